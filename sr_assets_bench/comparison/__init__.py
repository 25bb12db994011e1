"""The comparison of the results of a site with a second implementation of the rules."""
