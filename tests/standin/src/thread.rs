//! What belongs to a thread: its stack of contexts, how it takes captures, and whether it may call
//! the driver.
//!
//! Nothing here has a destructor, so driver calls work until a thread's very end, as with the real
//! driver.

use std::cell::Cell;

use aquifer_device::Code;

use crate::abi::{Answer, Handle, INVALID_CONTEXT};
use crate::capture::Mode;

/// How deep a thread's stack of contexts may grow.
const DEPTH_MAX: usize = 16;

/// Contexts by handle, the current one last.
#[derive(Clone, Copy)]
struct Stack {
    contexts: [Handle; DEPTH_MAX],
    depth: usize,
}

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    /// Code of the program.
    Program,
    /// A call of the driver.
    Call,
    /// A call that removed the last reference of a user object.
    LastReference,
    /// A host function, which must not call the driver.
    HostFunction,
}

thread_local! {
    static DOING: Cell<Doing> = const { Cell::new(Doing::Program) };
    static STACK: Cell<Stack> = const { Cell::new(Stack { contexts: [0; DEPTH_MAX], depth: 0 }) };
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// Begins a call. False in a host function, which must not make any.
pub(crate) fn begin_call() -> bool {
    let allowed = DOING.get() != Doing::HostFunction;
    if allowed {
        DOING.set(Doing::Call);
    }
    allowed
}

/// Ends a call. True if it removed the last reference of a user object.
pub(crate) fn end_call() -> bool {
    DOING.replace(Doing::Program) == Doing::LastReference
}

/// The last reference of a user object is removed. True if a call of this thread does that.
pub(crate) fn note_last_reference() -> bool {
    let in_call = matches!(DOING.get(), Doing::Call | Doing::LastReference);
    if in_call {
        DOING.set(Doing::LastReference);
    }
    in_call
}

/// The thread runs host functions from now on.
pub(crate) fn enter_host_functions() {
    DOING.set(Doing::HostFunction);
}

/// The current context.
pub(crate) fn current() -> Option<Handle> {
    let stack = STACK.get();
    stack.depth.checked_sub(1).map(|top| stack.contexts[top])
}

/// Makes a context current, above the one that is.
pub(crate) fn push(context: Handle) -> Answer {
    let mut stack = STACK.get();
    let place = stack.contexts.get_mut(stack.depth).ok_or(Code::OUT_OF_MEMORY)?;
    *place = context;
    stack.depth += 1;
    STACK.set(stack);
    Ok(())
}

/// Takes the current context off.
pub(crate) fn pop() -> Answer<Handle> {
    let context = current().ok_or(INVALID_CONTEXT)?;
    let mut stack = STACK.get();
    stack.depth -= 1;
    STACK.set(stack);
    Ok(context)
}

/// Puts a context in the place of the current one; `None` only takes that off.
pub(crate) fn replace(context: Option<Handle>) -> Answer {
    if current().is_some() {
        pop()?;
    }
    context.map_or(Ok(()), push)
}

/// How the thread takes captures.
pub(crate) fn mode() -> Mode {
    MODE.get()
}

/// Changes how the thread takes captures, and returns how it took them.
pub(crate) fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}
