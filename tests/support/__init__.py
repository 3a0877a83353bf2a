"""What several test rooms share: an independent reference, and ways to run several ranks."""
