package link

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/flightlock/flightlock/internal/conn"
)

// Kind is what a Value is.
type Kind uint8

// The kinds of values, of RESP2 and RESP3. What RESP3 has besides is one of them: a boolean is an Int of 0 or
// 1, a double and a big number are strings of their text, and a set and a map are arrays.
const (
	Nil    Kind = iota
	Int         // N
	String      // Text: a simple or a bulk string
	Error       // Text: what the server says
	Array       // Items
	Push        // Items: a message, and no reply
)

// Value is what a server has sent. Text and Items are only good until the function that was called with them
// returns: what is kept of them is to be copied.
type Value struct {
	Kind  Kind
	N     int64
	Text  []byte
	Items []Value
}

// Err is the error that the Value is, or nil.
func (v *Value) Err() error {
	if v.Kind == Error {
		return conn.ReplyError(string(v.Text))
	}
	return nil
}

// String shows a Value in errors.
func (v Value) String() string {
	switch v.Kind {
	case Nil:
		return "nil"
	case Int:
		return strconv.FormatInt(v.N, 10)
	case Error:
		return "error " + string(v.Text)
	case Array:
		return fmt.Sprint(v.Items)
	case Push:
		return "push " + fmt.Sprint(v.Items)
	}
	return strconv.Quote(string(v.Text))
}

// maxReply is how long a reply may be: those to our scripts have some 100 bytes, and INFO has 10 KB. maxDepth
// is how many arrays may be within each other.
const (
	maxReply = 1 << 20
	maxDepth = 8
)

// errShort is the error for the beginning of a reply.
var errShort = errors.New("link: the reply is not complete")

// A protocolError is that of a server which does not speak RESP, or sends more than anything of ours may have
// as its reply.
type protocolError struct{ what string }

func (e *protocolError) Error() string { return "not a Redis server: " + e.what }

// parser reads one value after the other out of a buffer. items is used again for each of them.
type parser struct{ items []Value }

// next reads the value at the beginning of b, and returns how long it is. It is errShort if b has only a part
// of it.
func (p *parser) next(b []byte) (v Value, n int, err error) {
	p.items = p.items[:0]
	v, n, err = p.value(b, 0)
	if errors.Is(err, errShort) && len(b) > maxReply {
		err = &protocolError{fmt.Sprintf("a reply of more than %d bytes", maxReply)}
	}
	return v, n, err
}

func (p *parser) value(b []byte, depth int) (v Value, n int, err error) {
	end := bytes.IndexByte(b, '\n')
	if end < 0 {
		return v, 0, errShort
	}
	if end < 2 || b[end-1] != '\r' {
		return v, 0, &protocolError{fmt.Sprintf("a line without an end: %.40q", b)}
	}
	line, n := b[1:end-1], end+1
	switch b[0] {
	case '+', ',', '(':
		return Value{Kind: String, Text: line}, n, nil
	case '-':
		return Value{Kind: Error, Text: line}, n, nil
	case ':':
		v.Kind = Int
		v.N, err = number(line)
		return v, n, err
	case '#':
		switch string(line) {
		case "t":
			return Value{Kind: Int, N: 1}, n, nil
		case "f":
			return Value{Kind: Int}, n, nil
		}
	case '_':
		return v, n, nil
	case '$', '!', '=':
		return bulk(b[0], line, b[n:], n)
	case '*', '~', '%', '>', '|':
		return p.array(b, line, n, depth)
	}
	return v, 0, &protocolError{fmt.Sprintf("%.40q", b[:end])}
}

// bulk reads what follows the line of a string that says how long it is.
func bulk(kind byte, line, rest []byte, n int) (v Value, _ int, err error) {
	size, err := number(line)
	switch {
	case err != nil:
		return v, 0, err
	case size == -1 && kind == '$':
		return v, n, nil
	case size < 0 || size > maxReply:
		return v, 0, &protocolError{fmt.Sprintf("a string of %d bytes", size)}
	case int64(len(rest)) < size+2:
		return v, 0, errShort
	}
	text, end := rest[:size], rest[size:size+2]
	v = Value{Kind: String, Text: text}
	switch {
	case string(end) != "\r\n":
		return v, 0, &protocolError{fmt.Sprintf("a string without an end: %.40q", text)}
	case kind == '!':
		v.Kind = Error
	case kind == '=' && (len(text) < 4 || text[3] != ':'):
		return v, 0, &protocolError{fmt.Sprintf("a string without its format: %.40q", text)}
	case kind == '=':
		v.Text = text[4:]
	}
	return v, n + int(size) + 2, nil
}

// array reads what follows the line that says how many values it has.
func (p *parser) array(b, line []byte, n, depth int) (v Value, _ int, err error) {
	count, err := number(line)
	switch {
	case err != nil:
		return v, 0, err
	case count == -1 && b[0] == '*':
		return v, n, nil
	case count < 0 || depth == maxDepth || count > maxReply/4:
		return v, 0, &protocolError{fmt.Sprintf("an array of %d at depth %d", count, depth)}
	}
	if b[0] == '%' || b[0] == '|' {
		count *= 2
	}
	if count > int64(len(b)-n) {
		return v, 0, errShort // each value has more than a byte
	}
	first := len(p.items)
	p.items = append(p.items, make([]Value, count)...)
	for i := range int(count) {
		item, size, err := p.value(b[n:], depth+1)
		if err != nil {
			return v, 0, err
		}
		p.items[first+i] = item // which may be another array by now
		n += size
	}
	v = Value{Kind: Array, Items: p.items[first : first+int(count)]}
	switch b[0] {
	case '>':
		v.Kind = Push
	case '|': // says something of the value that follows, which nobody has asked for
		v, size, err := p.value(b[n:], depth)
		return v, n + size, err
	}
	return v, n, nil
}

func number(line []byte) (int64, error) {
	if len(line) == 0 || len(line) > 20 {
		return 0, &protocolError{fmt.Sprintf("%.40q is no number", line)}
	}
	negative, n := line[0] == '-', uint64(0)
	digits := line
	if negative || line[0] == '+' {
		digits = line[1:]
	}
	for _, c := range digits {
		if c < '0' || c > '9' || n > math.MaxInt64/10 {
			return 0, &protocolError{fmt.Sprintf("%.40q is no number", line)}
		}
		n = 10*n + uint64(c-'0')
	}
	if len(digits) == 0 || n > math.MaxInt64 {
		return 0, &protocolError{fmt.Sprintf("%.40q is no number", line)}
	}
	if negative {
		return -int64(n), nil
	}
	return int64(n), nil
}

// AppendArray begins a command of n arguments.
func AppendArray(b []byte, n int) []byte {
	b = append(b, '*')
	b = strconv.AppendInt(b, int64(n), 10)
	return append(b, '\r', '\n')
}

// AppendArg adds an argument.
func AppendArg[T string | []byte](b []byte, arg T) []byte {
	b = append(b, '$')
	b = strconv.AppendInt(b, int64(len(arg)), 10)
	b = append(b, '\r', '\n')
	b = append(b, arg...)
	return append(b, '\r', '\n')
}

// AppendInt adds a number as an argument.
func AppendInt(b []byte, n int64) []byte {
	var digits [20]byte
	return AppendArg(b, strconv.AppendInt(digits[:0], n, 10))
}

// AppendCommand adds a whole command.
func AppendCommand(b []byte, args ...string) []byte {
	b = AppendArray(b, len(args))
	for _, arg := range args {
		b = AppendArg(b, arg)
	}
	return b
}
