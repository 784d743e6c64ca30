package main

import "syscall"

// prSetChildSubreaper is PR_SET_CHILD_SUBREAPER of prctl(2).
const prSetChildSubreaper = 36

// dieWithParent makes the kernel kill CMD's first process when this one dies, by kill -9 too; not its
// descendants. Those that it orphans become children of this process, which reaps them: where process 1 does
// not, they would count as left for good. If the kernel refuses that, so they do.
func dieWithParent(attr *syscall.SysProcAttr) {
	attr.Pdeathsig = syscall.SIGKILL
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0)
}
