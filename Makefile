# The commands of this repository. `make` or `make help` lists them.

GO ?= go
# A pipe fails if any part of it does.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# Every module: the root and those nested below it, but for those whose dependencies .ci/run could not get.
MODULES := $(filter-out $(UNAVAILABLE),$(sort $(dir $(shell find . -name go.mod -not -path './.git/*'))))
# Those that check dashboards and alerts, draw plots or run other lock libraries are left to test-long: they bring most of
# what would be compiled. The others of make test, the one that takes longest first.
LATER := ./docs/check/ ./bench/peers/
SOONER := $(filter-out $(LATER),$(MODULES))
OTHERS := ./examples/service/ $(filter-out ./ ./examples/service/,$(SOONER))
# Packages of the root module whose tests start servers: these, and all in test. The others have virtual time, or none.
REAL := /(fenced|lua|rediscache|bench|cmd/flightlock|test/[a-z]+|internal/(doctest|node|quorum|redistest))$$
# Those that take longest begin first: else they would be what is waited for at the end, one at a time.
SLOWEST := ./test/sharing ./test/scale ./rediscache
# The race detector, but not in the Lua interpreter of the servers in memory: it is not ours, and would take half of the
# processor time. (The translated C of a database would, too, but instances of sync.Map that are compiled with it would
# then be those of the whole program, and report races that are none.)
RACE := -race '-gcflags=github.com/yuin/gopher-lua/...=-race=false'
# With several processors the detector of Go 1.26 crashes, and reports races that are none, where timers of a bubble run
# at the same time (golang/go#78156). It finds races by the order of events, which one processor does not change.
RACED := $(RACE) -cpu 1
# vet has checked what is tested, once.
TEST := $(CURDIR)/.ci/test -vet=off -timeout 20m
# Tests of which test has a third of the rounds, or none, and soak all.
FULL := ^Test(ALockOutlivesAnOutage|ProcessesShareAKey|TicksThroughKills|CommandsOfOneKeyNeverOverlap|OldClientsAndNewOnesExcludeEachOther)$$
# Tests of internal/sim that run one world after the other.
WORLDS := ^Test(AmnesiaOfAMajority|ClocksThatJumpAhead|TokensOfANodeThatForgot|SeedsThatFailed)
# A process with the race detector sleeps before it exits, a second unless it is told otherwise.
export GORACE ?= atexit_sleep_ms=50

.DEFAULT_GOAL := help
.PHONY: help test test-long format vet lint compile virtual real modules worlds sim long race later soak soak-worlds
.PHONY: soak-faults platforms
.PHONY: mutations fuzz kills forget model fleet bench compare demo service faults paused picture lines repeat

help: ## list the targets, with their times on 2 cores and a warm build cache
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: format vet lint compile ## 4 min, 8 if nothing was compiled: format, vet, lint, every package, the models, the simulation
	@$(MAKE) --no-print-directory -k -j 3 real modules virtual worlds sim
	@if command -v redis-server >/dev/null; then \
	  echo "make test: all tests ran, on $$(redis-server --version | cut -d' ' -f1-3)$$(command -v golangci-lint >/dev/null || echo '; not linted')"; \
	else \
	  echo "****************************************************************"; \
	  echo "make test: redis-server is not on this machine, so NOTHING was"; \
	  echo "tested on real servers: no restarts, no stopped nodes, no"; \
	  echo "Cluster, no proxy faults. Install it and run this again."; \
	  echo "****************************************************************"; \
	fi

test-long: race later soak platforms ## 12 min: what test leaves out: races on real servers (Valkey), plots and rivals, more faults and seeds, some mutants, other systems

format:
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "not gofmt'ed:"; echo "$$out"; exit 1; fi

vet:
	@for m in $(SOONER); do (cd $$m && $(GO) vet ./...) || exit 1; done

lint:
	@if command -v golangci-lint >/dev/null; then \
	  for m in $(MODULES); do (cd $$m && golangci-lint run ./...) || exit 1; done; \
	else echo "golangci-lint is not installed: not linted"; fi

# Everything is compiled once, before any test runs: what talks to real servers as vet has it, without the race detector;
# and with it what has virtual time, and what that imports.
compile:
	@for m in $(SOONER); do (cd $$m && $(GO) list -test -deps -export ./... >/dev/null) || exit 1; done
	@$(GO) list $(RACE) -test -deps -export $$($(GO) list ./... | grep -vE '$(REAL)|/docs/model') >/dev/null

# The parts of test. Three of them run at a time. Tests on real servers wait, most of the time.
real:
	@$(TEST) -p 3 -parallel 4 -- $(SLOWEST) $$($(GO) list ./... | grep -E '$(REAL)')

modules:
	@for m in $(OTHERS); do (cd $$m && $(TEST) -p 1 -- ./...) || exit 1; done

virtual:
	@$(TEST) $(RACED) -skip '$(WORLDS)' -- $$($(GO) list ./... | grep -vE '$(REAL)|/docs/model')

# What virtual leaves out: the race detector makes it ten times slower, and has nothing to find in it.
worlds:
	@$(TEST) -skip '^TestSim$$' -- ./docs/model/... ./internal/sim

# Without the race detector, which makes it ten times slower; virtual has a few seeds with it.
# A world needs one core, and has half of the seeds.
sim: ## 10 s: the simulation: SEEDS worlds (default 100) from the FIRST (default 1)
	@first=$${FIRST:-1}; seeds=$${SEEDS:-100}; half=$$((seeds / 2)); \
	run() { $(GO) test ./internal/sim -count=1 -run '^TestSim$$' -v -timeout 24h -first $$1 -seeds $$2; }; \
	if [ $$half = 0 ]; then run $$first $$seeds; exit; fi; \
	run $$first $$half & run $$((first + half)) $$((seeds - half)); second=$$?; wait $$! && exit $$second

# Services in full: thousands of keys, busy processors, outages, deploys. Without the race detector, and
# nearly all of it one test at a time: what is measured is a service, its servers and nothing else. Not part of
# test-long, because some of it has limits that only a machine with nothing else to do keeps.
long: ## 10 min: services under load in full: thousands of keys, busy processors, outages, deploys
	FLIGHTLOCK_LONG=1 $(GO) test -count=1 -parallel 4 -timeout 60m -v ./test/scale

# What talks to real servers once more, with the race detector, and on Valkey instead of Redis. 5 min
race: export FLIGHTLOCK_REDIS_SERVER ?= valkey-server
race: export FLIGHTLOCK_REQUIRE_REDIS ?= 1
race:
	@$(GO) list $(RACE) -test -deps -export ./... >/dev/null
	@for m in $(OTHERS); do (cd $$m && $(GO) list $(RACE) -test -deps -export ./... >/dev/null) || exit 1; done
	@for m in $(OTHERS); do (cd $$m && $(TEST) $(RACED) -p 1 -- ./...) || exit 1; done & \
	$(TEST) $(RACED) -p 2 -parallel 4 -- $(SLOWEST) $$($(GO) list ./... | grep -E '$(REAL)'); \
	real=$$?; wait $$! && exit $$real

# The modules that test leaves out. 1 min, or 2 if nothing was compiled
later:
	@for m in $(LATER); do (cd $$m && $(GO) vet ./... && $(TEST) -p 1 -- ./...) || exit 1; done

# The root module, and what else compiles there without modules that only other systems need. 1 min, or 5 if
# nothing was compiled for them before
platforms:
	@for os in darwin windows; do for m in . faults docs/check; do \
	  (cd $$m && GOOS=$$os CGO_ENABLED=0 $(GO) vet ./...) || exit 1; done; done
	@cd bench/peers && GOOS=darwin CGO_ENABLED=0 $(GO) vet ./...

# More of what is random, all faults, the mutants that the simulation must notice, and what the race detector makes too
# slow. 4 min
soak:
	@$(MAKE) --no-print-directory -k -j 2 soak-worlds soak-faults

# What needs the processors, and what mostly waits: beside each other.
soak-worlds:
	$(TEST) -- . ./fetch ./flightlocktest ./internal/flight
	$(GO) run ./internal/mutants -sim
	SEEDS=800 FIRST=101 $(MAKE) --no-print-directory sim

soak-faults:
	FLIGHTLOCK_LONG=1 $(TEST) -run '$(FULL)' -- ./test/outage ./test/sharing ./cmd/flightlock
	cd examples/service && FLIGHTLOCK_LONG=1 $(GO) test -count=1 -run InShort . & \
	(cd faults && FLIGHTLOCK_LONG=1 $(GO) test -count=1 -timeout 10m ./...); faults=$$?; wait $$! && exit $$faults

# It continues where it was stopped, and leaves out what has not changed since; FRESH=1: nothing. ONLY=regexp: these
# mutants. ALL=1: the tests of all packages, not only up to the first in which one fails; that takes hours.
mutations: ## 1 h: break each rule, one at a time, and write which tests notice: internal/mutants/killed.tsv
	@$(GO) run ./internal/mutants $(if $(ALL),-all) $(if $(FRESH),-fresh) $(if $(ONLY),-only '$(ONLY)')

fleet: ## 10 min: processes that cache, on real servers, all of which are stopped and killed: no stale value (FOR=5m each mode)
	FLIGHTLOCK_REQUIRE_REDIS=1 $(GO) test ./rediscache -count=1 -run '^TestFleet$$' -v -fleet $${FOR:-5m} -timeout 60m

model: ## 6 min: models of grants and retained leases, by chance and (with spin and gcc) exhaustive: each rule taken out in turn
	$(GO) run ./docs/model -worlds $${WORLDS:-500}

bench: ## 20 min: go test -bench, as for tuning
	$(GO) test -run '^$$' -bench . -benchmem -timeout 30m ./bench

compare: ## 1 h, with QUICK=1 5 min: flightlock and its rivals side by side
	cd bench/peers && $(GO) run . $(if $(QUICK),-quick -out quick,-readme ../../README.md)

demo: ## 15 s: the main job on embedded nodes
	$(GO) run ./bench

service: ## 5 min: the example service under load and faults, beside singleflight and redsync: a table
	$(GO) run -C examples/service . -demo $(if $(ONLY),-only "$(ONLY)")

faults: ## 5 min: break real servers and networks under several processes; DURATION=30m, ONLY=SIGSTOP, KIND=dragonfly
	cd faults && $(GO) run . $(if $(DURATION),-duration $(DURATION)) $(if $(ONLY),-only "$(ONLY)") $(if $(KIND),-kind $(KIND))

# The paused-holder test: updates that are lost without the token, and with it. 1 min
paused:
	cd faults && $(GO) run . -paused 60s

# Most of it is for what is refused or cut off while a node is asked what it remembers.
forget: ## 15 min: the tests of nodes that lose locks, TRIES times each (default 250)
	FLIGHTLOCK_TRIES=$${TRIES:-250} $(GO) test -count=1 -parallel 16 -run 'NoSecondGrant' -v -timeout 60m ./test/forget

# Exclusion in all that is made of locks: readers, permits, sets of keys, ticks, locks that are detached and attached.
kills: ## 25 min: processes on real servers, all of which are killed and stopped, tests of test/sharing in full
	FLIGHTLOCK_LONG=1 $(GO) test -count=1 -run 'AreKilled|OfProcesses|ThroughKills' -v -parallel 2 -timeout 90m \
	  ./test/sharing -ticks 1000

fuzz: ## 10 min: each fuzz target for FUZZTIME (default 30s)
	@for p in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz'); do \
	    $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $${FUZZTIME:-30s} $$p || exit 1; done; done

lines: ## 1 s: the size of the library, room by room, of its tests and of its tools
	@$(GO) run ./internal/lines

# Of make test: make repeat WHAT=test TIMES=8. The packages are given as directories: PACKAGES="./lua ./faults".
repeat: ## hours: tests on real servers TIMES times (default 30) beside BESIDE busy processes (4), with a log; see .ci/repeat
	@PACKAGES="$${PACKAGES:-$$($(GO) list -f '{{.Dir}}' ./... | sed 's|^$(CURDIR)|.|' | grep -E '$(REAL)') ./faults ./examples/service ./examples/service/internal/app}" .ci/repeat

picture: ## 2 min: the dashboard of docs/metrics.md, from a run; needs redis-server
	cd docs/check && $(GO) run ./picture
