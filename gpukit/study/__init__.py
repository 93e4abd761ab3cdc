"""Measure and compare."""
