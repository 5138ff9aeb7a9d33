"""How tests are distributed to the workers of pytest-xdist.

A file goes to one worker as a whole, so that what its tests share is made once; so does a group of files
(`pytest.mark.xdist_group`). Groups start processes of their own. They come first, and one worker is always left to
files, so that no more processes compute at once than time limits allow for.
"""

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController


class FilesAndGroups(LoadGroupScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return super()._split_scope(nodeid).partition("::")[0]  # the name of a group, or the path of a file

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = [units for one, units in self.assigned_work.items() if one is not node]
        busy = sum(any(is_group(name) and not all(tests.values()) for name, tests in units.items()) for units in others)
        is_groups_turn = busy < max(1, self.numnodes - 1)
        if found := [name for name in self.workqueue if is_group(name) is is_groups_turn]:
            self.workqueue.move_to_end(found[0], last=False)
        super()._assign_work_unit(node)


def is_group(scope: str) -> bool:
    return not scope.endswith(".py")
