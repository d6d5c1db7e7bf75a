//! Calls by destructors of thread-locals, which outlive the library's own thread-locals.

use std::cell::RefCell;
use std::sync::mpsc;
use std::thread;

use aquifer::memory::{AllocError, Contents, PoolOptions};
use aquifer::prelude::*;

/// Runs when the thread ends.
struct Late(Option<Box<dyn FnOnce()>>);

impl Drop for Late {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|late| late());
    }
}

thread_local! {
    static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
}

/// What a buffer of zeros, and all that made it, are used for.
type Work<R> = fn(&Allocator, &Stream, &mut Buffer<f32>) -> Result<R, aquifer::Error>;

/// Does the work when a thread ends that registered its own thread-local before the library's.
fn at_the_end_of_a_thread<R: Send + 'static>(memory: &Allocator, work: Work<R>) -> Result<R, aquifer::Error> {
    let (sender, receiver) = mpsc::channel();
    let memory = memory.clone();
    let thread = thread::spawn(move || {
        LATE.with_borrow_mut(|late| assert!(late.is_none()));
        let stream = memory.device().stream()?;
        let mut x = memory.alloc_zeros::<f32>(1 << 20, &stream)?;
        drop((memory.keep_awake()?, memory.graph(&stream, |stream| x.sum(stream))?));
        assert_eq!(x.slice(..1).item(&stream)?, 0.0);
        LATE.set(Some(Late(Some(Box::new(move || {
            sender.send(work(&memory, &stream, &mut x)).unwrap_or_else(|_| unreachable!());
        })))));
        Ok::<(), aquifer::Error>(())
    });
    thread.join().expect("it does not panic")?;
    receiver.recv().expect("the work was done")
}

#[test]
fn destructors_of_thread_locals_may_use_the_library() -> Result<(), aquifer::Error> {
    let device = aquifer::open("sim:1GiB,violations=panic")?;
    let memory = Allocator::new(&device, "")?;
    // Some thread is routed, so that no request takes the fast path.
    let pool = memory.create_pool(PoolOptions::default())?;
    let _route = pool.route_thread();
    let all: [Work<f32>; 9] = [
        |_, stream, x| x.fill(2.0, stream).and_then(|()| x.slice(..1).item(stream)),
        |memory, stream, _| memory.alloc_zeros::<f32>(1000, stream)?.slice(..1).item(stream).map(|zero| zero + 2.0),
        |memory, stream, _| memory.from_slice(&[2.0], stream)?.item(stream),
        |_, stream, x| x.upload(vec![2.0; 1 << 20], stream)?.wait().and_then(|_| x.slice(5..6).item(stream)),
        |memory, _, _| memory.pinned::<f32>(1000).map(|_| 2.0),
        |memory, _, _| Ok(memory.keep_awake().map(|_| 2.0)?),
        |memory, stream, x| {
            let graph = memory.graph(stream, |stream| x.sum(stream))?;
            x.fill(2.0 / (1 << 20) as f32, stream)?;
            graph.launch(stream)?;
            graph.output().item(stream)
        },
        |memory, stream, x| {
            x.fill(2.0, stream)?;
            memory.sleep(Contents::SaveToHost)?;
            memory.wake()?;
            x.slice(..1).item(stream)
        },
        |memory, _, _| Ok(if memory.snapshot().segments.is_empty() { 0.0 } else { 2.0 }),
    ];
    for (at, work) in all.into_iter().enumerate() {
        assert_eq!(at_the_end_of_a_thread(&memory, work)?, 2.0, "{at}");
    }
    assert_eq!(memory.stats().allocated_bytes.all.current, 0);
    Ok(())
}

#[test]
fn a_thread_that_ends_does_not_wait_for_itself_to_let_its_allocator_sleep() -> Result<(), aquifer::Error> {
    let memory = Allocator::new(&aquifer::open("sim:1GiB")?, "")?;
    at_the_end_of_a_thread(&memory, |memory, _, _| {
        let _awake = memory.keep_awake()?;
        let slept = memory.sleep(Contents::Discard);
        assert!(matches!(slept, Err(AllocError::KeptAwake(by)) if by.is_this_thread));
        Ok(())
    })
}

#[test]
fn a_thread_that_ends_gets_what_other_allocators_cache() -> Result<(), aquifer::Error> {
    let device = aquifer::open("sim:64MiB")?;
    let [memory, other] = [Allocator::new(&device, "")?, Allocator::new(&device, "")?];
    drop(other.alloc::<u8>(40 << 20, device.default_stream())?);
    at_the_end_of_a_thread(&memory, |memory, stream, _| memory.alloc::<u8>(40 << 20, stream).map(drop))
}
