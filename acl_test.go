package flightlock_test

// smallestACL are the commands of docs/operations.md.
const smallestACL = "+evalsha +script|load +set +get +del +pttl +pexpire +incrby +time +ping " +
	"+publish +spublish +subscribe +ssubscribe +unsubscribe +sunsubscribe"
