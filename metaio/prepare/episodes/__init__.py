"""From raw rows to episodes: ids, order, splits, support and query, drawn negatives."""
