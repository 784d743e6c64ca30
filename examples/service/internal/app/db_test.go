package app

import (
	"fmt"
	"testing"
)

// Processes that start together find no database, or one that another process is making.
func TestProcessesMakeTheDatabaseTogether(t *testing.T) {
	for round := range 40 {
		file := fmt.Sprintf("%s/%d.db", t.TempDir(), round)
		together(6, func(int) {
			db, err := OpenDB(t.Context(), file)
			if err != nil {
				t.Error(round, err)
				return
			}
			if _, err := newBank(t.Context(), db, nil, "", 3, nil); err != nil {
				t.Error(round, err)
			}
			if err := db.Close(); err != nil {
				t.Error(round, err)
			}
		})
	}
}
