# The commands of this repository. `make` or `make help` lists them.

GO ?= go
# Every module: the root and those nested below it.
MODULES := $(sort $(dir $(shell find . -name go.mod -not -path './.git/*')))
# The packages whose tests run in virtual time, or have no deadline that a busy machine misses.
VIRTUAL := flightlock/(flightlocktest|internal/(clock|flight|progress|sim))$$

# What the tests of a service's size are called.
LONG ?= TryLocks|ColdCache|BusyProcess|HeldLocks|StoppedNodes|SilentNodes|LostSYN|FirstLock|SlowObserver|RollingRestart|FailingOrigin

.DEFAULT_GOAL := help
.PHONY: help test format vet lint race sim long mutations bench compare demo service faults paused forget valkey fuzz picture

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: format vet lint race sim ## everything: format, vet, lint if present, tests with the race detector, the simulation
	@if command -v redis-server >/dev/null; then \
	  echo "make test: all tests ran, on $$(redis-server --version | cut -d' ' -f1-3)$$(command -v golangci-lint >/dev/null || echo '; not linted')"; \
	else \
	  echo "****************************************************************"; \
	  echo "make test: redis-server is not on this machine, so NOTHING was"; \
	  echo "tested on real servers: no restarts, no stopped nodes, no"; \
	  echo "Cluster, no proxy faults. Install it and run this again."; \
	  echo "****************************************************************"; \
	fi

format: ## fail if a file is not gofmt'ed
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "not gofmt'ed:"; echo "$$out"; exit 1; fi

vet: ## go vet over all modules
	@for m in $(MODULES); do (cd $$m && $(GO) vet ./...) || exit 1; done

lint: ## golangci-lint over all modules, where it is installed
	@if command -v golangci-lint >/dev/null; then \
	  for m in $(MODULES); do (cd $$m && golangci-lint run ./...) || exit 1; done; \
	else echo "golangci-lint is not installed: not linted"; fi

# One test at a time: what runs on real servers has deadlines that a busy machine misses. But
# everything is compiled before that, and the packages of virtual time run side by side. A process
# with the race detector sleeps before it exits, a second unless it is told otherwise.
race: export GORACE = atexit_sleep_ms=50
race: ## go test -race over all modules
	@for m in $(MODULES); do (cd $$m && $(GO) list -race -test -deps -export ./... >/dev/null) || exit 1; done
	@$(CURDIR)/.ci/race -timeout 10m -- $$($(GO) list ./... | grep -E '$(VIRTUAL)')
	@for m in $(MODULES); do (cd $$m && \
	  $(CURDIR)/.ci/race -p 1 -parallel 1 -timeout 10m -- $$($(GO) list ./... | grep -vE '$(VIRTUAL)')) || exit 1; done

# Without the race detector, which would make it ten times slower; the race target has a few seeds with it.
# A world needs one core, and has half of the seeds.
sim: ## the simulation: SEEDS worlds (default 1000) from the FIRST (default 1); a minute for 1000
	@first=$${FIRST:-1}; seeds=$${SEEDS:-1000}; half=$$((seeds / 2)); \
	run() { $(GO) test ./internal/sim -count=1 -run '^TestSim$$' -v -timeout 24h -first $$1 -seeds $$2; }; \
	if [ $$half = 0 ]; then run $$first $$seeds; exit; fi; \
	run $$first $$half & run $$((first + half)) $$((seeds - half)); second=$$?; wait $$! && exit $$second

# Without the race detector, and one test at a time: what is measured is a service, its servers and nothing else.
long: ## services under load, in full: thousands of keys, busy processors, outages, deploys; 10 minutes
	FLIGHTLOCK_LONG=1 $(GO) test -count=1 -p 1 -parallel 1 -timeout 60m -v -run '$(LONG)' .

mutations: ## break each safety rule, one at a time, and see that it is noticed: a table; 3 minutes
	@$(GO) test ./internal/sim -count=1 -run '^TestMutations' -v -timeout 60m -mutations | grep -v '^=== '

bench: ## go test -bench, as for tuning; takes some minutes
	$(GO) test -run '^$$' -bench . -benchmem -timeout 30m ./bench

compare: ## flightlock and its rivals side by side, on redis-servers of their own: 25 minutes, QUICK=1: 3 minutes
	cd bench/peers && $(GO) run . $(if $(QUICK),-quick -out quick,-readme ../../README.md)

demo: ## the main job on embedded nodes
	$(GO) run ./bench

service: ## the example service in eleven phases of load and faults, beside singleflight and redsync: a table; 5 minutes
	$(GO) run -C examples/service . -demo $(if $(ONLY),-only "$(ONLY)")

faults: ## break real servers and networks under several processes: 5 minutes; DURATION=30m, ONLY=SIGSTOP
	cd faults && $(GO) run . $(if $(DURATION),-duration $(DURATION)) $(if $(ONLY),-only "$(ONLY)")

paused: ## the paused-holder test: updates that are lost without the token, and with it; a minute
	cd faults && $(GO) run . -paused 60s

# What talks to real servers, without the race detector, which has been there by then.
valkey: ## the tests on real servers once more, on Valkey instead of Redis; wants valkey-server
	FLIGHTLOCK_REDIS_SERVER=valkey-server FLIGHTLOCK_REQUIRE_REDIS=1 $(GO) test -count=1 -p 1 -parallel 1 -timeout 10m \
	  . ./fenced ./internal/node ./internal/pubsub ./internal/quorum ./internal/redistest ./lua
	cd faults && FLIGHTLOCK_REDIS_SERVER=valkey-server FLIGHTLOCK_REQUIRE_REDIS=1 $(GO) test -count=1 -timeout 5m ./...

# A quarter of an hour, most of it for what is refused or cut off while a node is asked what it remembers.
forget: ## the tests of nodes that forget locks, TRIES times each (default 250)
	FLIGHTLOCK_TRIES=$${TRIES:-250} $(GO) test -count=1 -run 'NoSecondGrant' -v -timeout 60m .

fuzz: ## each fuzz target for FUZZTIME (default 30s)
	@for p in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz'); do \
	    $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $${FUZZTIME:-30s} $$p || exit 1; done; done

picture: ## the dashboard of docs/metrics.md, from a run of 105 s; needs redis-server
	cd docs/check && $(GO) run ./picture
