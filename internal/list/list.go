// Package list is a doubly linked list whose elements carry their own links: adding an element
// needs no allocation, unlike with container/list.
package list

// Links are the links of an E, which is in one List at most. The zero value is in none.
type Links[E any] struct{ prev, next *E }

// Element is a pointer to an E that has Links.
type Element[E any] interface {
	*E
	ListLinks() *Links[E]
}

// List is a list of E. The zero value is empty. Its users guard it and the Links of its elements by
// one mutex.
type List[E any, P Element[E]] struct{ front, back *E }

// Front is the first element, nil if there is none.
func (l *List[E, P]) Front() *E { return l.front }

// Next is the element after e, nil if there is none.
func (l *List[E, P]) Next(e *E) *E { return P(e).ListLinks().next }

// PushBack appends e, which must be in no list.
func (l *List[E, P]) PushBack(e *E) {
	l.link(l.back, e)
	l.link(e, nil)
}

// Remove removes e, which must be in l.
func (l *List[E, P]) Remove(e *E) {
	at := P(e).ListLinks()
	l.link(at.prev, at.next)
	*at = Links[E]{}
}

// link makes b follow a; nil is the end of the list.
func (l *List[E, P]) link(a, b *E) {
	if a == nil {
		l.front = b
	} else {
		P(a).ListLinks().next = b
	}
	if b == nil {
		l.back = a
	} else {
		P(b).ListLinks().prev = a
	}
}
