//! Allocation tags: names that say what an allocation is for, in snapshots, history and OOM
//! reports.
//!
//! Names are interned once, so a tag is a number. It costs an allocation one thread-local read, and
//! nothing while no scope is open anywhere in the process.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use aquifer_device::fork::RwLock;

/// An interned name; 0 is no tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tag(pub(crate) u32);

#[derive(Debug, Default)]
struct Names {
    by_name: HashMap<Arc<str>, u32>,
    names: Vec<Arc<str>>,
}

static NAMES: LazyLock<RwLock<Names>> = LazyLock::new(RwLock::default);
static OPEN_SCOPES: AtomicUsize = AtomicUsize::new(0);

/// Different names kept; beyond this everything new is tagged [`OVERFLOW`].
const NAMES_MAX: usize = 1 << 16;
const OVERFLOW: &str = "(too many different tags)";

thread_local! {
    /// The tag of the last of `OPEN`: all that an allocation looks at.
    static CURRENT: Cell<Tag> = const { Cell::new(Tag(0)) };
    /// The thread's open scopes, innermost last, with a number to end the right one.
    static OPEN: RefCell<Open> = const { RefCell::new(Open { scopes: Vec::new(), opened: 0 }) };
}

#[derive(Debug)]
struct Open {
    scopes: Vec<(u64, Tag)>,
    /// Scopes that this thread opened so far.
    opened: u64,
}

impl Tag {
    pub(crate) fn intern(name: &str) -> Tag {
        if let Some(&number) = NAMES.read().by_name.get(name) {
            return Tag(number);
        }
        let mut names = NAMES.write();
        let name: Arc<str> = if names.names.len() < NAMES_MAX { name.into() } else { OVERFLOW.into() };
        if let Some(&number) = names.by_name.get(&name) {
            return Tag(number);
        }
        names.names.push(name.clone());
        let number = u32::try_from(names.names.len()).unwrap_or(0);
        names.by_name.insert(name, number);
        Tag(number)
    }

    /// The name, or `None` for no tag.
    pub(crate) fn name(self) -> Option<Arc<str>> {
        let index = (self.0 as usize).checked_sub(1)?;
        NAMES.read().names.get(index).cloned()
    }

    /// The tag of the innermost open scope of this thread.
    #[inline]
    pub(crate) fn current() -> Tag {
        if OPEN_SCOPES.load(Ordering::Relaxed) == 0 { Tag::default() } else { CURRENT.get() }
    }

    /// The name of the current tracing span of this thread.
    pub(crate) fn of_span() -> Tag {
        tracing::Span::current().metadata().map_or_else(Tag::current, |span| Tag::intern(span.name()))
    }
}

/// Names the allocations that this thread makes while the scope is alive. Scopes nest; the
/// innermost counts. They may end in any order.
///
/// Names are kept for the life of the process: the first 65,536 different ones, including those of
/// [spans](crate::config::TagSource::Span). All later ones become `(too many different tags)`. So
/// let a name say what memory is for, not for which request.
///
/// ```
/// use aquifer::memory::TagScope;
/// let _layer = TagScope::new("layer 3");
/// {
///     let _attention = TagScope::new("layer 3 attention");
///     // allocations here are tagged "layer 3 attention"
/// }
/// ```
#[derive(Debug)]
#[must_use = "the scope ends when this is dropped"]
pub struct TagScope {
    number: u64,
    /// Scopes belong to the thread that opened them.
    not_send: PhantomData<*const ()>,
}

impl TagScope {
    /// Opens a scope named `name`.
    pub fn new(name: &str) -> TagScope {
        let tag = Tag::intern(name);
        OPEN_SCOPES.fetch_add(1, Ordering::Relaxed);
        // A thread that ends may have lost its list before it drops what opens a scope: then only
        // the last one counts.
        let number = OPEN.try_with(|open| {
            let mut open = open.borrow_mut();
            open.opened += 1;
            let number = open.opened;
            open.scopes.push((number, tag));
            number
        });
        CURRENT.set(tag);
        TagScope { number: number.unwrap_or(0), not_send: PhantomData }
    }
}

impl Drop for TagScope {
    fn drop(&mut self) {
        let left = OPEN.try_with(|open| {
            let mut open = open.borrow_mut();
            open.scopes.retain(|&(number, _)| number != self.number);
            open.scopes.last().map(|&(_, tag)| tag)
        });
        CURRENT.set(left.ok().flatten().unwrap_or_default());
        OPEN_SCOPES.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_nest_and_belong_to_their_thread() {
        let _outer = TagScope::new("outer");
        {
            let _inner = TagScope::new("inner");
            assert_eq!(Tag::current().name().as_deref(), Some("inner"));
            std::thread::spawn(|| assert_eq!(Tag::current(), Tag(0))).join().unwrap();
        }
        assert_eq!(Tag::current().name().as_deref(), Some("outer"));
        assert_eq!(Tag::intern("outer"), Tag::intern("outer"));
    }

    #[test]
    fn scopes_end_in_any_order() {
        // Open elsewhere, so that this thread's tag is looked at without a scope of its own.
        let (opened, wait_opened) = std::sync::mpsc::channel();
        let (end, wait_end) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            let _other = TagScope::new("other");
            opened.send(()).unwrap();
            wait_end.recv().unwrap();
        });
        wait_opened.recv().unwrap();
        let scopes = ["first", "second", "third"].map(TagScope::new);
        let [first, second, third] = scopes;
        drop(first);
        assert_eq!(Tag::current().name().as_deref(), Some("third"));
        drop(third);
        assert_eq!(Tag::current().name().as_deref(), Some("second"));
        drop(second);
        assert_eq!(Tag::current(), Tag(0));
        end.send(()).unwrap();
        other.join().unwrap();
    }
}
