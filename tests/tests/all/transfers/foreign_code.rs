//! Code of callers that the library runs (drops of owners, wakers, sources of batches, reclaimers)
//! may wait for transfers, and for the threads that wait for transfers. Each test has a ring of one
//! thread, and fails where it stands still.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use aquifer::transfer::{Batch, Owner, Prefetcher, Spiller, Transfer, TransferConfig};
use aquifer::{Pending, Tensor};
use aquifer_tests::prelude::*;

use super::{Bench, to_device, to_vec};

/// Bytes that go through the ring.
const STAGED: usize = 1 << 20;

/// Long enough for any machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn with_one_thread() -> Bench {
    let mut bench = Bench::new();
    let config = TransferConfig::default().threads(1);
    bench.transfer = Transfer::with_config(bench.transfer.allocator(), config).unwrap();
    bench
}

/// Runs a test on a thread of its own, and fails if it does not end.
fn ends(test: impl FnOnce() + Send + 'static) {
    let (tell, told) = channel();
    let runs = thread::spawn(move || {
        test();
        tell.send(()).unwrap();
    });
    if told.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        panic!("it stands still");
    }
    runs.join().unwrap();
}

/// An owner whose drop runs a closure.
struct Page<F: FnOnce()>(Vec<u8>, Option<F>);

impl<F: FnOnce()> AsRef<[u8]> for Page<F> {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl<F: FnOnce()> Drop for Page<F> {
    fn drop(&mut self) {
        self.1.take().into_iter().for_each(|run| run());
    }
}

/// An owner whose drop waits for a staged transfer, in all ways, and for all transfers of its
/// runtime.
fn waits(bench: &Bench, dropped: &Sender<()>) -> impl AsRef<[u8]> + Send + Sync + 'static {
    let (transfer, stream, dropped) = (bench.transfer.clone(), bench.stream.clone(), dropped.clone());
    Page(
        vec![1; STAGED],
        Some(move || {
            let buffer = to_device(&transfer, vec![2u8; STAGED], &stream).unwrap().wait().unwrap();
            assert_eq!(pollster::block_on(to_vec(&transfer, &buffer).unwrap()).unwrap()[0], 2);
            transfer.synchronize().unwrap();
            dropped.send(()).unwrap();
        }),
    )
}

#[test]
fn owners_that_wait_for_transfers_when_dropped_block_no_transfer() {
    ends(|| {
        let bench = with_one_thread();
        let (transfer, (tell, dropped)) = (bench.transfer.clone(), channel());
        let mut buffer = bench.alloc(STAGED as u64);
        buffer.upload(Owner::new(waits(&bench, &tell)), &transfer).unwrap().wait().unwrap();
        drop(buffer.upload(Owner::new(waits(&bench, &tell)), &transfer).unwrap());
        buffer.upload(Owner::new(waits(&bench, &tell)), &transfer).unwrap().cancel();
        let tensor = Tensor::from_owner::<u8, _>(waits(&bench, &tell), &[STAGED]).unwrap();
        let moved = tensor.to(&transfer).unwrap();
        drop(tensor);
        drop(moved.wait().unwrap());
        let mut pinned = transfer.pinned().alloc::<u8>(STAGED).unwrap();
        // Held back by a download, so that another thread begins it.
        drop(buffer.download(&mut pinned, &transfer).unwrap());
        transfer.synchronize().unwrap();
        for _ in 0..4 {
            dropped.recv_timeout(PATIENCE).unwrap();
        }
        drop((transfer, buffer, pinned));
        bench.finish();
    });
}

/// The thread that waits for the transfer holds a lock that the owner's drop needs.
#[test]
fn waiting_for_a_transfer_does_not_wait_for_the_drop_of_its_owner() {
    ends(|| {
        let bench = with_one_thread();
        let (lock, (tell, dropped)) = (Arc::new(Mutex::new(())), channel());
        let held = lock.lock().unwrap();
        let needs = Page(vec![1; STAGED], {
            let lock = lock.clone();
            Some(move || {
                drop(lock.lock().unwrap());
                tell.send(()).unwrap();
            })
        });
        drop(bench.send(STAGED, Owner::new(needs)));
        bench.transfer.synchronize().unwrap();
        drop(held);
        dropped.recv_timeout(PATIENCE).unwrap();
        bench.finish();
    });
}

#[test]
fn an_owner_of_the_standard_library_is_dropped_before_the_transfer_is_complete() {
    let bench = with_one_thread();
    let owner: Arc<[u8]> = vec![1; STAGED].into();
    drop(bench.send(STAGED, owner.clone()));
    assert_eq!(Arc::strong_count(&owner), 1);
    bench.finish();
}

#[test]
fn an_owner_that_panics_when_dropped_fails_nothing() {
    ends(|| {
        let bench = with_one_thread();
        for _ in 0..3 {
            let panics = Page(vec![1; STAGED], Some(|| panic!("an owner's")));
            drop(bench.send(STAGED, Owner::new(panics)));
        }
        bench.finish();
    });
}

/// Wakes once the closure has run.
struct Woken<F>(F, Sender<()>);

impl<F: Fn() + Send + Sync + 'static> Wake for Woken<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
        // The test may be over.
        let _ = self.1.send(());
    }
}

fn await_with<T>(mut pending: Pending<T>, waker: &Waker, woken: &Receiver<()>) -> T {
    loop {
        match std::pin::Pin::new(&mut pending).poll(&mut Context::from_waker(waker)) {
            Poll::Ready(value) => return value.unwrap(),
            Poll::Pending => woken.recv_timeout(PATIENCE).unwrap(),
        }
    }
}

#[test]
fn wakers_that_wait_for_transfers_block_no_transfer() {
    ends(|| {
        let bench = with_one_thread();
        let (transfer, stream) = (bench.transfer.clone(), bench.stream.clone());
        let (tell, woken) = channel();
        let waits = move || {
            let buffer = to_device(&transfer, vec![2u8; STAGED], &stream).unwrap().wait().unwrap();
            // Awaited, so woken as this one was.
            assert_eq!(pollster::block_on(to_vec(&transfer, &buffer).unwrap()).unwrap()[0], 2);
            pollster::block_on(transfer.enqueued_on(&stream).unwrap()).unwrap();
        };
        let waker = Waker::from(Arc::new(Woken(waits, tell)));
        for len in [1000, STAGED] {
            let sent = to_device(&bench.transfer, vec![7u8; len], &bench.stream).unwrap();
            let buffer = await_with(sent, &waker, &woken);
            let bytes = await_with(to_vec(&bench.transfer, &buffer).unwrap(), &waker, &woken);
            assert_eq!(bytes, vec![7; len]);
        }
        drop(waker);
        bench.finish();
    });
}

/// The waker of an earlier transfer on a stream waits until that of a later one ran.
#[test]
fn a_waker_may_wait_for_another_one_of_the_same_stream() {
    ends(|| {
        let bench = Bench::new();
        let on_stream = bench.transfer.on(&bench.stream).unwrap();
        bench.driver.stall(&bench.stream, Duration::from_millis(1)).unwrap();
        let mut pendings = [(); 2].map(|()| to_device(&on_stream, vec![7u8; 1000], &bench.stream).unwrap());
        let ((tell_first, first), (tell_second, second)) = (channel(), channel());
        let (later, ran) = channel();
        let ran = Mutex::new(ran);
        let first_waker = Waker::from(Arc::new(Woken(move || ran.lock().unwrap().recv().unwrap(), tell_first)));
        let later = Mutex::new(later);
        let second_waker = Waker::from(Arc::new(Woken(move || _ = later.lock().unwrap().send(()), tell_second)));
        let mut open = [false; 2];
        for ((pending, waker), open) in pendings.iter_mut().zip([&first_waker, &second_waker]).zip(&mut open) {
            *open = std::pin::Pin::new(pending).poll(&mut Context::from_waker(waker)).is_pending();
        }
        // On a device that was quicker there is nothing to wait for.
        if open == [true; 2] {
            second.recv_timeout(PATIENCE).unwrap();
            first.recv_timeout(PATIENCE).unwrap();
        }
        drop((pendings, on_stream));
        bench.finish();
    });
}

/// Sending a batch needs the thread that drops the prefetcher.
#[test]
fn a_batch_may_wait_for_the_thread_that_drops_the_prefetcher() {
    struct Waits(Arc<Mutex<()>>, Sender<()>);

    impl Batch for Waits {
        type OnDevice = Buffer<u8>;

        fn send(self, to: &Transfer) -> Result<Pending<Buffer<u8>>, aquifer::Error> {
            self.1.send(()).unwrap();
            drop(self.0.lock().unwrap());
            vec![1u8; 1000].send(to)
        }
    }

    ends(|| {
        let bench = with_one_thread();
        let (lock, (tell, begun)) = (Arc::new(Mutex::new(())), channel());
        let held = lock.lock().unwrap();
        let source = [Waits(lock.clone(), tell)];
        let batches = Prefetcher::new(source, &bench.transfer, &bench.stream, 1).unwrap();
        begun.recv_timeout(PATIENCE).unwrap();
        drop(batches);
        drop(held);
        bench.finish();
    });
}

/// A reclaimer looks at the very buffer that is on its way back.
#[test]
fn a_reclaimer_may_ask_about_the_buffer_that_comes_back() {
    ends(|| {
        let bench = Bench::new();
        let allocator = bench.transfer.allocator().clone();
        let spiller = Spiller::new(&bench.transfer, 0).unwrap();
        let buffer = spiller.add(bench.alloc(64 << 20), 0).unwrap();
        buffer.spill().unwrap();
        let (buffer, asked) = (Arc::new(buffer), Arc::new(Mutex::new(Vec::new())));
        let fills: Arc<Mutex<Option<_>>> = Arc::default();
        *fills.lock().unwrap() = Some(allocator.alloc_bytes(200 << 20, &bench.stream).unwrap());
        let registration = allocator.register_reclaimer(1, "asks", {
            let (buffer, asked, fills) = (buffer.clone(), asked.clone(), fills.clone());
            move |_| {
                asked.lock().unwrap().push(buffer.is_on_device());
                fills.lock().unwrap().take().map_or(0, |memory: Allocation| memory.bytes())
            }
        });
        let stream: &Stream = &bench.stream;
        drop(buffer.access(stream).unwrap());
        assert_eq!(*asked.lock().unwrap(), [false]);
        drop((registration, buffer, spiller, fills, allocator));
        bench.finish();
    });
}
