// The program faults breaks real redis-servers, and the network before them, while several
// client processes lock, and tells what the lock did: which locks were granted, which tries
// failed with which error, whether two holders met within their validity, whether tokens
// rose, and whether the histories are linearizable.
//
//	make faults                   # all scenarios, a few minutes
//	make faults DURATION=30m      # again and again for so long
//	make faults ONLY=SIGSTOP      # those with that in their name
//	make faults KIND=dragonfly    # on servers that look like that: see docs/servers.md
//	make paused                   # the paused-holder test
//
// It is a module of its own, so that users of the library do not get the linearizability
// checker, github.com/anishathalye/porcupine. It runs on Linux only: see machineClock.
package main
