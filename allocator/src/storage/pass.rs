//! Two passes of the same work, the second of which is captured: what outlives the first is
//! allocated before the second begins.
//!
//! The free memory of a graph pool serves all captures of the pool, so each of its graphs may write
//! it. Memory that outlives a capture, such as a result, must not be a part of that: a launch of
//! another graph would write it while it is read. And it would lie in the way of larger graphs. The
//! first pass tells which allocations those are, by their size and their place among those of that
//! size. They get ordinary memory before the capture begins, which the second pass is handed.

use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Weak};

use aquifer_device::Stream;

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::state::AllocatorState;
use crate::storage::Storage;

thread_local! {
    /// The passes that this thread is in, innermost last. Without a destructor, so that destructors
    /// of other thread-locals can allocate.
    static PASSES: RefCell<ManuallyDrop<Vec<PassState>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// Size and alignment of a request.
type Layout = (u64, u64);

/// An allocation of a pass: its layout, and how many of that layout came before it.
type Allocated = (Layout, usize);

struct PassState {
    state: &'static AllocatorState,
    /// Its allocations, each with the stream that it was made for.
    made: Vec<(Allocated, Stream, Weak<Storage>)>,
    counts: HashMap<Layout, usize>,
    /// Memory for allocations to come.
    ready: HashMap<Allocated, Arc<Storage>>,
}

/// A pass of work on this thread, until it is dropped: it knows the storages that the work
/// allocates. The thread must be routed to a private pool meanwhile.
#[derive(Debug)]
#[must_use = "the pass ends when it is dropped"]
pub struct Pass {
    /// Bound to its thread.
    thread: PhantomData<*const ()>,
}

/// What outlived a pass.
#[derive(Debug)]
pub struct Outlived(Vec<(Allocated, Stream)>);

impl Pass {
    /// Begins a pass, without memory from an earlier one.
    pub fn first(allocator: &Allocator) -> Pass {
        Pass::begin(allocator, HashMap::new())
    }

    /// Begins a pass that repeats one. Memory for what outlived that is allocated now, for the same
    /// streams.
    ///
    /// # Errors
    /// As [`Allocator::alloc_storage`].
    pub fn again(allocator: &Allocator, outlived: &Outlived) -> Result<Pass, AllocError> {
        let allocate = |(allocated, stream): &(Allocated, Stream)| {
            let &((bytes, alignment), _) = allocated;
            Ok((*allocated, allocator.alloc_plain(bytes, alignment, stream)?))
        };
        let ready: Result<HashMap<_, _>, AllocError> = outlived.0.iter().map(allocate).collect();
        Ok(Pass::begin(allocator, ready?))
    }

    fn begin(allocator: &Allocator, ready: HashMap<Allocated, Arc<Storage>>) -> Pass {
        let pass = PassState { state: allocator.state(), made: Vec::new(), counts: HashMap::new(), ready };
        PASSES.with_borrow_mut(|passes| passes.push(pass));
        Pass { thread: PhantomData }
    }

    /// What the work allocated so far, without what an earlier pass told, that still exists.
    pub fn outlived(&self) -> Outlived {
        PASSES.with_borrow(|passes| {
            let made = passes.last().map(|pass| pass.made.as_slice()).unwrap_or_default();
            let alive = made.iter().filter(|(.., storage)| storage.strong_count() > 0);
            Outlived(alive.map(|(allocated, stream, _)| (*allocated, stream.clone())).collect())
        })
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        // What was not asked for goes back outside of the borrow.
        let _pass = PASSES.with_borrow_mut(|passes| {
            let pass = passes.pop();
            passes.shrink_to_fit();
            pass
        });
    }
}

impl Outlived {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|(((bytes, _), _), _)| bytes).sum()
    }
}

/// Serves a request, with memory that was allocated for it before if it is one of the work of a
/// pass.
#[track_caller]
#[cold]
#[inline(never)]
pub(super) fn alloc_in_pass(
    allocator: &Allocator,
    (bytes, alignment): Layout,
    stream: &Stream,
) -> Result<Arc<Storage>, AllocError> {
    let state = allocator.state();
    let own = |passes: &mut Vec<PassState>| {
        let pass = passes.last_mut().filter(|pass| std::ptr::eq(pass.state, state))?;
        let count = pass.counts.entry((bytes, alignment)).or_default();
        let allocated = ((bytes, alignment), *count);
        *count += 1;
        Some((allocated, pass.ready.remove(&allocated)))
    };
    match PASSES.with_borrow_mut(|passes| own(passes)) {
        None => allocator.alloc_plain(bytes, alignment, stream),
        Some((_, Some(ready))) => Ok(ready),
        Some((allocated, None)) => {
            let storage = allocator.alloc_plain(bytes, alignment, stream)?;
            let made = (allocated, stream.clone(), Arc::downgrade(&storage));
            PASSES
                .with_borrow_mut(|passes| passes.last_mut().into_iter().for_each(|pass| pass.made.push(made.clone())));
            Ok(storage)
        }
    }
}
