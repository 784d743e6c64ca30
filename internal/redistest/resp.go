package redistest

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// readCommand reads one command as clients send it: an array of bulk strings.
func readCommand(r *bufio.Reader) ([]string, error) {
	n, err := readLength(r, '*')
	if err != nil {
		return nil, err
	}
	args := make([]string, n)
	for i := range args {
		if args[i], err = readBulk(r); err != nil {
			return nil, err
		}
	}
	return args, nil
}

func readBulk(r *bufio.Reader) (string, error) {
	n, err := readLength(r, '$')
	if err != nil {
		return "", err
	}
	data := make([]byte, n+len("\r\n"))
	if _, err := io.ReadFull(r, data); err != nil {
		return "", err
	}
	return string(data[:n]), nil
}

// readLength reads a line that is the kind's letter and a number.
func readLength(r *bufio.Reader, kind byte) (int, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return 0, err
	}
	line = strings.TrimSuffix(line, "\r\n")
	n, err := strconv.Atoi(strings.TrimPrefix(line, string(kind)))
	if err != nil || line[0] != kind || n < 0 || n > maxLength {
		return 0, fmt.Errorf("redistest: got %q, want %c and a length", line, kind)
	}
	return n, nil
}

// maxLength bounds what a client can make us allocate.
const maxLength = 64 << 20
