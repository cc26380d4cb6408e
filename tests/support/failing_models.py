"""Code of Triton models that stop, fail or die at a chosen place."""

from tests.support.echo_server import ECHO


def initializing_with(statement: str) -> str:
    return ECHO.replace("        pass", f"        {statement}")


STOP_ONCE = '''
import os, signal, time

def stop_once(mark, seconds=2.5):
    """Stop this process unless `mark` exists; it goes on after `seconds`, with 0 never."""
    if os.path.exists(mark):
        return
    open(mark, "w").close()
    process = os.getpid()
    if seconds and not os.fork():
        try:
            while open("/proc/%d/stat" % process).read().rpartition(") ")[2][0] != "T":
                time.sleep(0.01)
            time.sleep(seconds)
            os.kill(process, signal.SIGCONT)
        finally:
            os._exit(0)
    os.kill(process, signal.SIGSTOP)
'''
STOPPING = 'stop_once(__file__ + ".stopped", 0)'
