"""Taking the model out: other forms of a trained model, what each is worth and what it loses."""
