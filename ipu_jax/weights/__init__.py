"""Where weights and state lie: packed arrays for the stages of one IPU, split or whole ones for concurrent stages."""
