"""How results are shown: tables, plots, model cards."""
