//go:build !unix

package redistest

import "errors"

var errNoSignals = errors.New("redistest: this system cannot stop a process")

func (p *process) stop() error { return errNoSignals }
func (p *process) cont() error { return errNoSignals }
