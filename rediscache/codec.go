package rediscache

import "encoding/json"

// Codec turns values into bytes and back. It is called concurrently. A panic in it is an error, but
// in Get and Peek the caller's.
type Codec[V any] struct {
	Encode func(V) ([]byte, error)
	// Decode may keep b, and must not change it. An error is a miss: the value is loaded again.
	Decode func(b []byte) (V, error)
}

// JSON is the default Codec, except for []byte and string.
func JSON[V any]() Codec[V] {
	return Codec[V]{
		Encode: func(v V) ([]byte, error) { return json.Marshal(v) },
		Decode: func(b []byte) (v V, err error) {
			err = json.Unmarshal(b, &v)
			return v, err
		},
	}
}

// Bytes is the default Codec for []byte: the value as it is.
func Bytes() Codec[[]byte] {
	return Codec[[]byte]{
		Encode: func(v []byte) ([]byte, error) { return v, nil },
		Decode: func(b []byte) ([]byte, error) { return b[:len(b):len(b)], nil },
	}
}

// Text is the default Codec for string: the value as it is.
func Text() Codec[string] {
	return Codec[string]{
		Encode: func(v string) ([]byte, error) { return []byte(v), nil },
		Decode: func(b []byte) (string, error) { return string(b), nil },
	}
}

// defaultCodec is Bytes or Text where V is such a type, else JSON.
func defaultCodec[V any]() Codec[V] {
	for _, codec := range []any{Bytes(), Text()} {
		if codec, ok := codec.(Codec[V]); ok {
			return codec
		}
	}
	return JSON[V]()
}
