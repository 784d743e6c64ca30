package main

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// This file has the limits: locks of one key in one process.

type semaphoreLock struct{ sem *semaphore.Weighted }

func openSemaphore(settings) (locker, error) { return semaphoreLock{semaphore.NewWeighted(1)}, nil }

func (s semaphoreLock) lock(ctx context.Context, _ string) (held, error) {
	if err := s.sem.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	return s, nil
}

func (s semaphoreLock) release() error {
	s.sem.Release(1)
	return nil
}

func (s semaphoreLock) close() {}

type mutexLock struct{ mu *sync.Mutex }

func openMutex(settings) (locker, error) { return mutexLock{new(sync.Mutex)}, nil }

func (m mutexLock) lock(context.Context, string) (held, error) {
	m.mu.Lock()
	return m, nil
}

func (m mutexLock) release() error {
	m.mu.Unlock()
	return nil
}

func (m mutexLock) close() {}
