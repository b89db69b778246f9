"""Where bytes go and how they get there whole: atomic files, staged folders, links, run folders. Knows no content."""
