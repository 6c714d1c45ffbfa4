"""What papers define: norms, placements, optimisers, statistics and corpora, each an entry with its source."""
