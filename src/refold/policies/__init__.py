"""Ways to make a view smaller: pure functions from a view and a budget to a plan, one idea per file."""
