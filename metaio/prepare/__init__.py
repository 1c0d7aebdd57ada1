"""From raw logs to a prepared dataset, on one machine or with Spark."""
