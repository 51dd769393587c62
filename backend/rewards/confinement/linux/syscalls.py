"""The system calls that confined code has no need of, by their numbers on each processor.

Sources: Linux's arch/x86/entry/syscalls/syscall_64.tbl and scripts/syscall.tbl (64-bit ARM).
"""

from __future__ import annotations

import platform

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""`platform.machine()` → AUDIT_ARCH_…, by which a filter knows whose numbers it sees."""
NEWEST = 469
"""The newest call in the tables below. The numbers of newer ones are the same on all processors."""

_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # name: x86_64, aarch64; None where the processor has no such call
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "perf_event_open": (298, 241),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "ioprio_set": (251, 30),
    "bpf": (321, 280), "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116),
    "init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "iopl": (172, None), "ioperm": (173, None),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191),
    "semop": (65, 193), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "setpriority": (141, 140), "prlimit64": (302, 261),
    "fork": (57, None), "vfork": (58, None), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "capset": (126, 91), "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "ioctl": (16, 29),
}  # fmt: skip

CHANGES_OF_ATTRIBUTES = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "futimesat", "utimensat", "file_setattr"),
    *(
        "setxattr",
        "lsetxattr",
        "fsetxattr",
        "setxattrat",
        "removexattr",
        "lremovexattr",
        "fremovexattr",
        "removexattrat",
    ),
)
"""Permissions, owners, times and extended attributes of files, which Landlock does not control. A filter sees no paths."""

FORBIDDEN = (
    # another process's memory, descriptors and standing
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "pidfd_getfd", "kcmp"),
    *(
        "perf_event_open",
        "migrate_pages",
        "move_pages",
        "ioprio_set",
        "sched_setscheduler",
        "sched_setparam",
        "sched_setattr",
        "setpriority",  # process 0 of PRIO_USER are all of the user's
    ),
    # what all processes of a user share: keys, System V's memory, semaphores and queues, POSIX's queues
    *("keyctl", "add_key", "request_key", "shmget", "shmat", "shmctl", "semget", "semctl", "semop", "semtimedop"),
    *("msgget", "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink"),
    # ways around the other rules: namespaces, mounts, files by number, programs in the kernel
    *(
        "mount",
        "umount2",
        "pivot_root",
        "chroot",
        "open_tree",
        "open_tree_attr",
        "move_mount",
        "fsopen",
        "fsconfig",
        "fsmount",
    ),
    *("fspick", "mount_setattr", "unshare", "setns", "name_to_handle_at", "open_by_handle_at", "fanotify_init", "bpf"),
    *("userfaultfd", "quotactl", "quotactl_fd"),
    # the machine, where the user is root
    *("acct", "swapon", "swapoff", "reboot", "sethostname", "setdomainname", "syslog", "init_module", "delete_module"),
    *("finit_module", "kexec_load", "kexec_file_load", "iopl", "ioperm", "settimeofday", "clock_settime", "adjtimex"),
    "clock_adjtime",
)
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
FORKS = ("fork", "vfork")
"""Calls that make a process and nothing else; `clone` makes threads too."""
NOT_THERE = ("io_uring_setup", "io_uring_enter", "io_uring_register", "clone3")
"""Calls answered as by a kernel that has none: io_uring does the work of other calls unseen by a filter, and clone3 has its
flags where a filter cannot read them. Callers use the older calls then."""


def number(name: str, machine: str | None = None) -> int | None:
    """The number of a call on this processor; None where it has none, or is a processor that we have no numbers for."""
    machine = machine or platform.machine()
    return _NUMBERS[name][list(MACHINES).index(machine)] if machine in MACHINES else None
