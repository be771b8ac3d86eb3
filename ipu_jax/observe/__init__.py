"""Look at programs from outside: what runs on which IPUs."""
