//! Where calls were made: return addresses, which become names when a finding is written.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::path::Path;

/// How many frames are kept, some of this library's own among them, and how many are written.
const KEPT: usize = 24;
const WRITTEN: usize = 10;

/// The return addresses of a call.
pub(crate) type Stack = [usize; KEPT];

/// The stack of the calling thread.
pub(crate) fn here() -> Stack {
    let (mut stack, mut length) = ([0; KEPT], 0);
    backtrace::trace(|frame| {
        stack[length] = frame.ip().addr();
        length += 1;
        length < KEPT
    });
    stack
}

/// Stacks by number, each once.
#[derive(Debug, Default)]
pub(crate) struct Stacks {
    numbers: HashMap<Stack, u64>,
    all: Vec<Stack>,
}

impl Stacks {
    /// Numbers are smaller than this.
    pub(crate) const END: u64 = 1 << 24;

    pub(crate) fn number(&mut self, stack: Stack) -> u64 {
        let next = self.all.len() as u64;
        if next == Stacks::END {
            return Stacks::END - 1;
        }
        *self.numbers.entry(stack).or_insert_with(|| {
            self.all.push(stack);
            next
        })
    }

    pub(crate) fn get(&self, number: u64) -> Stack {
        usize::try_from(number).ok().and_then(|number| self.all.get(number)).copied().unwrap_or([0; KEPT])
    }
}

/// The frames of a stack as text, the caller of `call` first.
pub(crate) fn frames(stack: Stack, call: &str) -> Vec<String> {
    let mut frames: Vec<String> = stack.into_iter().take_while(|&ip| ip != 0).flat_map(described).collect();
    let is_call = |frame: &String| frame.split([' ', '\n']).next().is_some_and(|name| name.starts_with(call));
    if let Some(own) = frames.iter().rposition(is_call) {
        frames.drain(..=own);
    }
    let is_runtime = |frame: &String| frame.contains("__rust_begin_short_backtrace");
    let end = frames.iter().position(is_runtime).unwrap_or(WRITTEN);
    frames.truncate(end.min(WRITTEN));
    frames
}

/// The functions at a return address, those that were inlined there first.
fn described(ip: usize) -> Vec<String> {
    let mut found = Vec::new();
    backtrace::resolve(std::ptr::without_provenance_mut(ip), |symbol| {
        let Some(name) = symbol.name() else { return };
        // Without the hash that ends the names of Rust.
        let name = format!("{name:#}");
        found.push(match (symbol.filename(), symbol.lineno()) {
            (Some(file), Some(line)) => format!("{name} ({}:{line})", file.display()),
            _ => name,
        });
    });
    if found.is_empty() {
        found.push(in_library(ip));
    }
    found
}

/// A return address by the library that it is in.
fn in_library(ip: usize) -> String {
    // SAFETY: all zeros are a value of this type.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is only looked up.
    let is_known = unsafe { libc::dladdr(std::ptr::without_provenance::<c_void>(ip), &raw mut info) } != 0;
    if !is_known || info.dli_fname.is_null() {
        return format!("{ip:#x}");
    }
    // SAFETY: the loader's string, which lasts as long as the library is loaded.
    let file = unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy();
    let name = Path::new(&*file).file_name().unwrap_or_default().to_string_lossy();
    format!("{name}+{:#x}", ip.wrapping_sub(info.dli_fbase.addr()))
}
