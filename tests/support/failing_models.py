"""Code of Triton models that stop, fail or die at a chosen place."""

from echo_server import ECHO


def initializing_with(statement: str) -> str:
    return ECHO.replace("        pass", f"        {statement}")


STOP_ONCE = '''
import os, signal, time

def stop_once(mark, seconds=2.5):
    """Stop this process unless `mark` exists; it goes on after `seconds`, with 0 never."""
    if os.path.exists(mark):
        return
    open(mark, "w").close()
    if seconds and not os.fork():
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
'''
STOPPING = 'stop_once(__file__ + ".stopped", 0)'
STOPPED_IN_INITIALIZE = STOP_ONCE + initializing_with(STOPPING)
