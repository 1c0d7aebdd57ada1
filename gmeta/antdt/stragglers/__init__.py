"""From verdicts to actions: the controller, its loop in the service, the settings of both."""
