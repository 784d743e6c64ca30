// Flightlock runs commands under locks on Redis, and shows who has which lock.
//
//	export FLIGHTLOCK_REDIS=redis://a:6379,redis://b:6379,redis://c:6379
//	flightlock run -key nightly -try -- /usr/local/bin/report
//	flightlock ls
//	flightlock check
//
// docs/command.md describes it: what it promises about the processes of a command, and its exit codes. job.go
// and guard.go are its heart: a lock, and the process group that does not outlive it.
package main

import (
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"strings"
)

// The exit codes. Those that sysexits.h has mean there what they mean here. A command that was run ends with
// its own code, or 128 and the signal that ended it.
const (
	exitOK          = 0
	exitFailed      = 1  // check: a finding failed; revoke: the owner does not have the lock
	exitUsage       = 64 // a flag or argument is wrong
	exitUnavailable = 69 // no majority of the nodes can be reached, or has a vote
	exitHeld        = 75 // another has the lock
	exitLost        = 76 // the lock was lost while the command ran
	exitNotRun      = 126
	exitNotFound    = 127
	exitSignal      = 128 // and the number of the signal
)

// A command is the first argument. It returns the exit code.
type command struct {
	name, args, does string
	run              func(args []string) int
}

func commands() []command {
	return []command{
		{"run", "[flags] -key NAME -- CMD [ARG...]", "run CMD while the lock on NAME is held", run},
		{"elect", "[flags] NAME [--] CMD [ARG...]", "run CMD while this process leads, and whenever it leads again",
			elect},
		{"ls", "[flags] [PATTERN]",
			"list the keys that are locked, by SCAN: it reads through all keys of the nodes",
			ls}, {"who", "[flags] KEY", "show who has the lock on KEY, and who waits for it", who},
		{"watch", "[flags] KEY", "the same, whenever that has changed", watch},
		{"revoke", "[flags] KEY -owner OWNER", "end the lock of one owner on KEY: its holder is asked to stop",
			revoke}, {"check", "[flags]", "report whether the nodes are fit for locking", check},
	}
}

func usage(to io.Writer) {
	fmt.Fprint(to, "usage: flightlock COMMAND [flags] [arguments]\n\n")
	for _, c := range commands() {
		fmt.Fprintf(to, "  flightlock %s %s\n        %s\n", c.name, c.args, c.does)
	}
	fmt.Fprint(to,
		"\nThe nodes are those of -redis, or of FLIGHTLOCK_REDIS. `flightlock COMMAND -h` lists the flags.\n"+
			"Exit codes: 75 another has the lock, 69 too few nodes can be reached, 76 the lock was lost, 64 usage.\n")
}

func main() { os.Exit(flightlockMain(os.Args[1:])) }

func flightlockMain(args []string) int {
	log.SetFlags(0)
	slog.SetLogLoggerLevel(slog.LevelWarn)
	if len(args) == 0 {
		usage(os.Stderr)
		return exitUsage
	}
	for _, c := range commands() {
		if c.name == args[0] {
			return c.run(args[1:])
		}
	}
	switch args[0] {
	case "-h", "-help", "--help", "help":
		usage(os.Stdout)
		return exitOK
	}
	return refuse(fmt.Errorf("%q is no command: see flightlock -h", args[0]))
}

// complain writes an error to stderr. Those of the library begin with its name.
func complain(err error) { log.Print("flightlock: ", strings.TrimPrefix(err.Error(), "flightlock: ")) }

// refuse reports a wrong flag or argument.
func refuse(err error) int {
	complain(err)
	return exitUsage
}
