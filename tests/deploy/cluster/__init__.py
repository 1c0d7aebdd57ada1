"""A stand-in for a cluster: what an overlay renders runs as processes on this machine, each in a
network namespace and a root file system of its own, with the commands, variables, volumes, users
and rights that the manifests give it. There is no scheduler, and network policies are not enforced.
"""
