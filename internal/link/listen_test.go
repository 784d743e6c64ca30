package link

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flightlock/flightlock/internal/conn"
)

// listens has the link subscribe, and note what becomes of that, with each session.
func listens(verb, channel string) func(*rig, *Options) {
	return func(r *rig, o *Options) {
		var last *Session
		o.Attend = func(s *Session) time.Duration {
			if err := s.Pushes(); err != nil {
				r.note("no pushes: %v", err)
			} else if s != last {
				last = s
				r.listen(s, verb, channel)
			}
			return 0
		}
		o.Ended = func(*Session) { r.note("ended") }
	}
}

func (r *rig) listen(s *Session, verb, channel string) {
	s.Listen(verb, channel, func(err error) { r.note("%s %s: %v", verb, channel, err) })
}

// pubSub answers subscriptions as Redis does, and the rest by its name.
func pubSub(_ *client, cmd []string) string {
	switch verb := strings.ToLower(cmd[0]); {
	case strings.HasSuffix(verb, "subscribe"):
		return pushOf(verb, cmd[1])
	case verb == "ping" && len(cmd) > 1:
		return bulkOf(cmd[1])
	}
	return bulkOf(strings.Join(cmd, " "))
}

// answering changes pubSub's answers to some commands.
func answering(to map[string]string) func(c *client, cmd []string) string {
	return func(c *client, cmd []string) string {
		if answer, is := to[strings.ToLower(cmd[0])]; is {
			return answer
		}
		return pubSub(c, cmd)
	}
}

const ping = "PING " + pong

// Messages come in their order among the replies, and no reply is another call's.
func TestMessages(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.s.setAnswer(answering(map[string]string{
			"subscribe": pushOf("subscribe", "inbox") + pushOf("message", "inbox", "0"),
			"b":         pushOf("message", "inbox", "1") + bulkOf("b") + pushOf("message", "inbox", "2"),
		}))
		r.opened2("push subscribe inbox", "push message inbox 0", "SUBSCRIBE inbox: <nil>")
		r.do("a", "b", "c")
		r.want("a", "push message inbox 1", "b", "push message inbox 2", "c")
	}, listens("SUBSCRIBE", "inbox"))
}

// opened2 is opened for a link on which that happens then.
func (r *rig) opened2(events ...string) {
	r.t.Helper()
	r.Connect()
	r.want(events...)
	r.s.commands()
}

// Whatever a server has to say to a subscription, what is behind it has its own replies.
func TestSubscriptionsThatAreRefused(t *testing.T) {
	for _, c := range []struct {
		name, verb string
		answers    map[string]string
		want       []string
	}{
		{"refused", "SUBSCRIBE", map[string]string{"subscribe": "-NOPERM no\r\n"},
			[]string{"SUBSCRIBE c: NOPERM no"}},
		{"PING refused", "SUBSCRIBE", map[string]string{"ping": "-NOPERM ping\r\n"},
			[]string{"push subscribe c", "SUBSCRIBE c: <nil>"}},
		{"both", "SUBSCRIBE", map[string]string{"subscribe": "-BUSY a\r\n", "ping": "-BUSY b\r\n"},
			[]string{"SUBSCRIBE c: BUSY a"}},
		{"without a word", "SUBSCRIBE", map[string]string{"subscribe": ""}, []string{"SUBSCRIBE c: <nil>"}},
		{"ended", "SUNSUBSCRIBE", nil, []string{"push sunsubscribe c", "SUNSUBSCRIBE c: <nil>"}},
		{"ended, PING refused", "UNSUBSCRIBE", map[string]string{"ping": "-LOADING x\r\n"},
			[]string{"push unsubscribe c", "UNSUBSCRIBE c: <nil>"}},
		{"both refused at the end", "UNSUBSCRIBE", map[string]string{"unsubscribe": "-BUSY a\r\n",
			"ping": "-BUSY b\r\n"}, []string{"UNSUBSCRIBE c: BUSY a"}},
		{"ended elsewhere, PING refused", "SUNSUBSCRIBE",
			map[string]string{"sunsubscribe": pushOf("sunsubscribe", "c") + "-MOVED 1 b:1\r\n",
				"ping": "-NOPERM x\r\n"}, []string{"push sunsubscribe c", "SUNSUBSCRIBE c: MOVED 1 b:1"}},
		{"ended elsewhere", "SUNSUBSCRIBE", map[string]string{"sunsubscribe": "-MOVED 1 b:1\r\n"},
			[]string{"SUNSUBSCRIBE c: MOVED 1 b:1"}},
		// the slot has moved before the command came: the same push, by the server itself
		{"ended before", "SUNSUBSCRIBE", map[string]string{"sunsubscribe": pushOf("sunsubscribe", "c") +
			"-MOVED 1 b:1\r\n"}, []string{"push sunsubscribe c", "SUNSUBSCRIBE c: MOVED 1 b:1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			link(t, func(t *testing.T, r *rig) {
				r.opened()
				r.s.setAnswer(answering(c.answers))
				s := r.Session()
				r.do("a")
				r.listen(s, c.verb, "c")
				r.do("b")
				r.want(append(append([]string{"a"}, c.want...), "b")...)
				if r.Session() != s {
					t.Error("the connection has ended")
				}
			})
		})
	}
}

// A server that agrees on RESP3, and sends messages as replies, gets nobody else's call wrong: the connection
// ends, and the next has no subscriptions.
func TestAServerThatSendsMessagesAsReplies(t *testing.T) {
	array := strings.Replace(pushOf("subscribe", "c"), ">", "*", 1)
	for name, answers := range map[string]map[string]string{
		"at once": {"subscribe": array},
		// it takes the connection for one on which there are only subscriptions from then on, as in RESP2
		"afterwards": {"ping": strings.Replace(pushOf("pong", pong), ">", "*", 1)},
	} {
		t.Run(name, func(t *testing.T) {
			link(t, func(t *testing.T, r *rig) {
				r.s.setAnswer(answering(answers))
				r.Connect()
				r.do("a!", "b!")
				time.Sleep(time.Second)
				synctest.Wait()
				r.do("c")
				events := r.happened()
				got := strings.Join(events, "\n")
				for _, want := range []string{"SUBSCRIBE c: " + errDeaf.Error(), "no pushes: " + errDeaf.Error()} {
					if !strings.Contains(got, want) {
						t.Errorf("%q is missing in\n%s", want, got)
					}
				}
				// the next link may say "no pushes" after it
				if strings.Contains(got, "got") || !slices.Contains(events, "c") {
					t.Errorf("a call has the reply of another:\n%s", got)
				}
			}, listens("SUBSCRIBE", "c"))
		})
	}
}

// A server that refuses HELLO 3 has no subscriptions.
func TestNoPushesWithoutRESP3(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.s.set(func() { r.s.resp2 = true })
		r.Connect()
		synctest.Wait()
		if got := r.happened(); len(got) == 0 || got[0] != "no pushes: "+ErrNoPushes.Error() {
			t.Errorf("got %q", got)
		}
		r.do("a")
		r.want("a")
		r.wantSent("boot,a")
	}, listens("SUBSCRIBE", "c"))
}

// A subscription is of one session. A link with one is made again, if that is asked for, though no call
// waits.
func TestSubscriptionsOfASessionEndWithIt(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.s.setAnswer(pubSub)
		r.opened2("push subscribe c", "SUBSCRIBE c: <nil>")
		time.Sleep(time.Second)
		r.s.cut()
		r.want("ended")
		r.wantSent("")
		r.Wake()
		r.want("push subscribe c", "SUBSCRIBE c: <nil>")
		r.wantSent("boot,SUBSCRIBE c," + ping)

		old := r.Session()
		r.s.set(func() { r.s.held = true })
		r.listen(old, "SUBSCRIBE", "lost")
		synctest.Wait()
		old.Drop(errRefused)
		r.listen(old, "SUBSCRIBE", "late")
		r.s.set(func() { r.s.held = false })
		r.wantSorted("SUBSCRIBE c: <nil>", "SUBSCRIBE late: "+ErrObsolete.Error(), "SUBSCRIBE lost: refused",
			"ended", "push subscribe c")
	}, listens("SUBSCRIBE", "c"))
}

// A connection on which only messages are waited for, and that is dead, is found out.
func TestPulse(t *testing.T) {
	link(t, func(t *testing.T, r *rig) {
		r.opened()
		for range 6 {
			time.Sleep(time.Second)
			synctest.Wait()
		}
		r.wantSent("PING,PING,PING")
		for range 4 {
			r.do("a")
			time.Sleep(time.Second)
			synctest.Wait()
		}
		r.wantSent("a,a,a,a")
		r.happened()
		r.s.set(func() { r.s.held = true })
		time.Sleep(2*time.Second + conn.TransportTimeout)
		if got := strings.Join(r.happened(), "\n"); !strings.Contains(got, errSilent.Error()) {
			t.Errorf("got\n%s", got)
		}
	}, func(_ *rig, o *Options) {
		o.Attend = func(s *Session) time.Duration {
			s.Pulse()
			return time.Second
		}
	})
}

// pulse has the server asked for a sign of life.
func (r *rig) pulse() {
	for range 2 { // it has answered the boot before
		r.Session().Pulse()
	}
}

// A link on which only messages are waited for is not given up because its server has a hiccup. A call that
// somebody waits for finds out sooner whether the server is there; and neither what waits for a boot nor Shut
// waits longer.
func TestAHiccupWhileNothingIsAskedFor(t *testing.T) {
	const hiccup = conn.TransportTimeout - time.Millisecond
	for name, wait := range map[string]func(r *rig){
		"a pulse":        func(r *rig) { r.pulse() },
		"a subscription": func(r *rig) { r.listen(r.Session(), "SUBSCRIBE", "c") },
		"both": func(r *rig) {
			r.pulse()
			r.listen(r.Session(), "SUBSCRIBE", "c")
		},
	} {
		t.Run(name, func(t *testing.T) {
			during := func(test func(t *testing.T, r *rig, wants ...string)) {
				t.Helper()
				link(t, func(t *testing.T, r *rig) {
					r.s.setAnswer(pubSub)
					r.opened()
					r.s.set(func() { r.s.held = true })
					wait(r)
					synctest.Wait()
					var wants []string
					if name != "a pulse" {
						wants = []string{"push subscribe c", "SUBSCRIBE c: <nil>"}
					}
					test(t, r, wants...)
				})
			}
			during(func(_ *testing.T, r *rig, wants ...string) {
				time.Sleep(hiccup)
				r.want()
				r.s.set(func() { r.s.held = false })
				r.want(wants...)
			})
			during(func(_ *testing.T, r *rig, wants ...string) {
				time.Sleep(hiccup - timeout/2)
				r.do("a")
				time.Sleep(timeout / 2)
				r.s.set(func() { r.s.held = false })
				r.want(append(wants, "a")...)
			})
			during(func(t *testing.T, r *rig, _ ...string) {
				time.Sleep(hiccup / 2)
				r.do("a")
				time.Sleep(silentAfter*timeout + conn.MinGrace)
				got := strings.Join(r.happened(), "\n")
				if !strings.Contains(got, "a is late") || !strings.Contains(got, "suspended: "+silent) {
					t.Errorf("got\n%s", got)
				}
			})
			during(func(t *testing.T, r *rig, _ ...string) {
				time.Sleep(hiccup / 2)
				r.Reboot()
				r.do("a")
				time.Sleep(timeout + conn.MinGrace)
				if got := strings.Join(r.happened(), "\n"); !strings.Contains(got, "suspended: "+silent) {
					t.Errorf("got\n%s", got)
				}
			})
			during(func(t *testing.T, r *rig, _ ...string) {
				select {
				case <-r.Shut():
				default:
					t.Error("Shut waits for what nobody waits for")
				}
				r.Close()
				r.happened()
			})
			during(func(t *testing.T, r *rig, _ ...string) {
				time.Sleep(conn.TransportTimeout + conn.MinGrace)
				if got := strings.Join(r.happened(), "\n"); !strings.Contains(got, "suspended: "+silent) {
					t.Errorf("got\n%s", got)
				}
			})
		})
	}
}

// Where callers read, messages arrive all the same: while one reads, and while nobody has sent anything. When
// there are no subscriptions any more, callers read again.
func TestMessagesWhileCallersRead(t *testing.T) {
	callersRead(t, func(t *testing.T, r *rig, x *readers) {
		r.s.setAnswer(answering(map[string]string{"a": pushOf("message", "c", "1") + bulkOf("a")}))
		r.s.set(func() { r.s.held = true })
		r.waits("a")
		x.want(t, "caller")
		r.listen(r.Session(), "SUBSCRIBE", "c")
		r.s.set(func() { r.s.held = false })
		// The caller that has read returns while the session's goroutine reads on: in whichever order.
		r.wantSorted("SUBSCRIBE c: <nil>", "a", "back from a", "push message c 1", "push subscribe c")
		x.want(t, "session")
		r.s.each(func(c *client) { c.write(pushOf("message", "c", "2")) })
		r.want("push message c 2")
		r.waits("b")
		r.wantSorted("b", "back from b")

		r.listen(r.Session(), "UNSUBSCRIBE", "c")
		r.want("push unsubscribe c", "UNSUBSCRIBE c: <nil>")
		r.do("b") // the session's goroutine reads still
		r.want("b")
		x.want(t, "session")
		r.waits("b")
		r.want("b", "back from b")
		x.want(t, "caller")
	})
}
