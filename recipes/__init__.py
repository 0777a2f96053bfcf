"""Recipes that come with fpquant, one YAML file each."""
