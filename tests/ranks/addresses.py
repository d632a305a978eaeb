"""Addresses at which a process listens."""

import psutil


def listening():
    """Return the hosts and ports at which this process listens."""
    sockets = psutil.Process().net_connections("tcp")
    return {tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN}
