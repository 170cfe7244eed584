"""What happens later: timers, schedules, messages to external systems, and state that expires."""
