"""The resources of this machine, and how much of each is used now.

The only package that reads psutil, `/proc`, control groups and CUDA's memory. Every function reads
when it is called and returns frozen values in bytes. Kept is only what others had of a GPU when it
was first looked at.

Memory that is limited together is a `MemoryPool`: the machine's, each control group's that this
process is in, `/dev/shm`'s, a GPU's. *This job* is this process and its descendants, such as the
workers of a `DataLoader`.
"""
