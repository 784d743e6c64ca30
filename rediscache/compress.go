package rediscache

import (
	"bytes"
	"compress/flate"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Compressed is codec with values compressed by DEFLATE, if their encodings have at least so many bytes and
// become shorter. Values stored without it cannot be read: use another Version. atLeast may change at any
// time. MaxValue is about what is stored; more than 512 MiB cannot be decompressed.
func Compressed[V any](codec Codec[V], atLeast int) Codec[V] {
	if codec.Encode == nil || codec.Decode == nil {
		return codec // which New refuses, or takes for the default
	}
	return Codec[V]{
		Encode: func(v V) ([]byte, error) {
			b, err := codec.Encode(v)
			if err != nil {
				return nil, err
			}
			if len(b) >= atLeast {
				if short, ok := deflated(b); ok {
					return short, nil
				}
			}
			return append([]byte{asItIs}, b...), nil
		},
		Decode: func(b []byte) (v V, err error) {
			switch {
			case len(b) > 0 && b[0] == asItIs:
				b = b[1:]
			case len(b) > 0 && b[0] == byDeflate:
				if b, err = inflated(b[1:]); err != nil {
					return v, err
				}
			default:
				return v, errors.New("flightlock: it was not encoded by Compressed")
			}
			return codec.Decode(b)
		},
	}
}

// The first byte of what Compressed has encoded.
const (
	asItIs    = 0
	byDeflate = 1
)

// Writers and readers are 0.7 MB and 40 KB, so they are used again.
var (
	writers = sync.Pool{New: func() any {
		w, _ := flate.NewWriter(nil, flate.BestSpeed) // the level is valid
		return w
	}}
	readers = sync.Pool{New: func() any { return flate.NewReader(nil) }}
)

// deflated is b compressed, with its first byte, if that is shorter.
func deflated(b []byte) (short []byte, ok bool) {
	var out bytes.Buffer
	out.WriteByte(byDeflate)
	w := writers.Get().(*flate.Writer)
	defer writers.Put(w)
	w.Reset(&out)
	_, err := w.Write(b)
	if err = errors.Join(err, w.Close()); err != nil { // a Buffer has none
		return nil, false
	}
	return out.Bytes(), out.Len() <= len(b)
}

func inflated(b []byte) ([]byte, error) {
	r := readers.Get().(io.ReadCloser)
	defer readers.Put(r)
	if err := r.(flate.Resetter).Reset(bytes.NewReader(b), nil); err != nil {
		return nil, err
	}
	long, err := io.ReadAll(io.LimitReader(r, int64(longestValue)+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("flightlock: decompressing a value: %w", err)
	case len(long) > longestValue:
		return nil, fmt.Errorf("flightlock: a value is longer than %d bytes when decompressed", longestValue)
	}
	return long, nil
}
