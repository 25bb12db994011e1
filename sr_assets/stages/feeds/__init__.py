"""The centre: advisory streams of all sites, folded or followed."""
