package main

import (
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// proxy stands in front of one node and can play its death: down refuses new connections and cuts
// those that are open, up lets them through again. The server behind it notices only that its
// clients left, so this works for a server that is not ours to kill.
type proxy struct {
	addr, target string

	mu    sync.Mutex // guards ln and conns
	ln    net.Listener
	conns map[net.Conn]struct{} // both ends of every connection
	wg    sync.WaitGroup        // accepting and copying goroutines
}

func newProxy(target string) (*proxy, error) {
	p := &proxy{addr: "127.0.0.1:0", target: target, conns: map[net.Conn]struct{}{}}
	if err := p.up(); err != nil {
		return nil, err
	}
	p.addr = p.ln.Addr().String()
	return p, nil
}

// up listens (again, on the same port).
func (p *proxy) up() error {
	var ln net.Listener
	var err error
	// Meanwhile the port may have served as the near end of somebody's connection: try again for a while.
	for range 20 {
		if ln, err = net.Listen("tcp", p.addr); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		return fmt.Errorf("the proxy in front of %s: %w", p.target, err)
	}
	p.mu.Lock()
	p.ln = ln
	p.mu.Unlock()
	p.wg.Go(func() { p.accept(ln) })
	return nil
}

// down closes the listener and all connections, and waits until nothing is copied any more.
func (p *proxy) down() {
	p.mu.Lock()
	if p.ln != nil {
		p.ln.Close()
		p.ln = nil
	}
	for c := range p.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *proxy) accept(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.forward(ln, c) })
	}
}

// forward copies both ways until either side ends.
func (p *proxy) forward(ln net.Listener, near net.Conn) {
	defer near.Close()
	far, err := net.DialTimeout("tcp", p.target, 2*time.Second)
	if err != nil {
		return
	}
	defer far.Close()
	if !p.track(ln, near, far) {
		return
	}
	defer p.untrack(near, far)
	done := make(chan struct{}, 2)
	pipe := func(dst, src net.Conn) {
		io.Copy(dst, src)
		done <- struct{}{}
	}
	p.wg.Go(func() { pipe(far, near) })
	p.wg.Go(func() { pipe(near, far) })
	<-done
}

// track registers a connection for down to close. It refuses one that was accepted before a down
// that has happened since: nothing would ever close it.
func (p *proxy) track(ln net.Listener, conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ln != ln {
		return false
	}
	for _, c := range conns {
		p.conns[c] = struct{}{}
	}
	return true
}

func (p *proxy) untrack(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		delete(p.conns, c)
	}
}
