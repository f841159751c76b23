"""Jobs for schedulers: what a recipe needs of one, and the files that each reads."""
