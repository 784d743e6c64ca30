package sim

import (
	"maps"
	"strings"

	"github.com/flightlock/flightlock/lua"
	glua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/parse"
)

// interpreter runs the real scripts. One serves all servers, for only one thing happens at
// a time; it is made outside of any bubble.
type interpreter struct {
	state   *glua.LState
	scripts map[string]*glua.FunctionProto // by source
	shared  map[string]bool                // scripts that are the same in every world
	call    func(args []string) any        // of the server whose script runs
}

func newInterpreter() *interpreter {
	in := &interpreter{state: glua.NewState(), scripts: map[string]*glua.FunctionProto{},
		shared: map[string]bool{lua.Boot.Source: true}}
	for _, s := range lua.All {
		in.shared[s.Source] = true
	}
	redis := in.state.NewTable()
	in.state.SetField(redis, "call", in.state.NewFunction(func(l *glua.LState) int {
		return in.command(l, true)
	}))
	in.state.SetField(redis, "pcall", in.state.NewFunction(func(l *glua.LState) int {
		return in.command(l, false)
	}))
	in.state.SetGlobal("redis", redis)
	return in
}

// forget drops the scripts of a world that has ended: each process of its nodes had its own.
func (in *interpreter) forget() {
	maps.DeleteFunc(in.scripts, func(source string, _ *glua.FunctionProto) bool { return !in.shared[source] })
}

// compile compiles a script.
func (in *interpreter) compile(source string) error {
	if in.scripts[source] != nil {
		return nil
	}
	chunk, err := parse.Parse(strings.NewReader(source), "user_script")
	if err != nil {
		return err
	}
	proto, err := glua.Compile(chunk, "user_script")
	if err == nil {
		in.scripts[source] = proto
	}
	return err
}

// run executes a compiled script, whose commands go to call.
func (in *interpreter) run(source string, keys, args []string, call func([]string) any) any {
	l := in.state
	in.call = call
	l.SetGlobal("KEYS", list(l, keys))
	l.SetGlobal("ARGV", list(l, args))
	l.Push(l.NewFunctionFromProto(in.scripts[source]))
	if err := l.PCall(0, 1, nil); err != nil {
		text := err.Error()
		if e, ok := err.(*glua.ApiError); ok && e.Object != glua.LNil { //nolint:errorlint // it comes unwrapped
			text = e.Object.String()
			if t, ok := e.Object.(*glua.LTable); ok {
				text = t.RawGetString("err").String()
			}
		}
		return failure(text + " script: on @user_script:0.")
	}
	v := l.Get(-1)
	l.Pop(1)
	return reply(v)
}

func list(l *glua.LState, texts []string) *glua.LTable {
	t := l.CreateTable(len(texts), 0)
	for _, s := range texts {
		t.Append(glua.LString(s))
	}
	return t
}

func (in *interpreter) command(l *glua.LState, raise bool) int {
	args := make([]string, l.GetTop())
	for i := range args {
		args[i] = l.Get(i + 1).String()
	}
	v := value2lua(l, in.call(args))
	if t, ok := v.(*glua.LTable); ok && raise && t.RawGetString("err") != glua.LNil {
		l.Error(t, 0)
	}
	l.Push(v)
	return 1
}

// value2lua is a command's reply as a script sees it.
func value2lua(l *glua.LState, v any) glua.LValue {
	switch v := v.(type) {
	case nil:
		return glua.LFalse
	case int64:
		return glua.LNumber(v)
	case string:
		return glua.LString(v)
	case status:
		t := l.NewTable()
		t.RawSetString("ok", glua.LString(v))
		return t
	case failure:
		t := l.NewTable()
		t.RawSetString("err", glua.LString(v))
		return t
	default:
		t := l.NewTable()
		for _, e := range v.([]any) {
			t.Append(value2lua(l, e))
		}
		return t
	}
}

// reply is a script's result as a client sees it.
func reply(v glua.LValue) any {
	switch v := v.(type) {
	case glua.LString:
		return string(v)
	case glua.LNumber:
		return int64(v)
	case glua.LBool:
		if v {
			return int64(1)
		}
		return nil
	case *glua.LTable:
		if e := v.RawGetString("err"); e != glua.LNil {
			return failure(e.String())
		}
		if ok := v.RawGetString("ok"); ok != glua.LNil {
			return status(ok.String())
		}
		all := []any{}
		for i := 1; v.RawGetInt(i) != glua.LNil; i++ {
			all = append(all, reply(v.RawGetInt(i)))
		}
		return all
	}
	return nil
}
