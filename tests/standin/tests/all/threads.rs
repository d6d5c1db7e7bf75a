//! Many threads on one device.

use std::ptr::null_mut;
use std::thread;

use aquifer_standin::Number;

use crate::support::{Card, call};

const THREADS: u64 = 4;
const ROUNDS: u64 = 300;

/// Allocates, fills, waits, checks and gives back, on a stream of the thread's own.
fn work(context: usize, thread: u64) {
    assert_eq!(call!(cuCtxSetCurrent(std::ptr::with_exposed_provenance_mut(context))), 0);
    let (mut stream, mut event) = (null_mut(), null_mut());
    assert_eq!([call!(cuStreamCreate(&mut stream, 1)), call!(cuEventCreate(&mut event, 2))], [0, 0]);
    for round in 0..ROUNDS {
        let (mut ptr, mut back, value) = (0, [0_u8; 64], (thread * ROUNDS + round) % 256);
        let value = u8::try_from(value).unwrap();
        assert_eq!(call!(cuMemAllocAsync(&mut ptr, 64, stream)), 0);
        assert_eq!(call!(cuMemsetD8Async(ptr, value, 64, stream)), 0);
        assert_eq!(call!(cuEventRecord(event, stream)), 0);
        assert_eq!(call!(cuMemcpyDtoHAsync_v2(back.as_mut_ptr().cast(), ptr, 64, stream)), 0);
        assert_eq!(back, [value; 64]);
        assert_eq!([call!(cuEventQuery(event)), call!(cuMemFreeAsync(ptr, stream))], [0, 0]);
    }
    assert_eq!(call!(cuStreamSynchronize(stream)), 0);
    assert_eq!([call!(cuEventDestroy_v2(event)), call!(cuStreamDestroy_v2(stream))], [0, 0]);
}

#[test]
fn threads_share_a_device() {
    let card = Card::new();
    let context = card.context.cu_ctx().expose_provenance();
    let threads: Vec<_> = (0..THREADS).map(|thread| thread::spawn(move || work(context, thread))).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!((card.device.number(Number::HeldBytes), card.device.number(Number::Streams)), (0, 0));
    assert_eq!(card.device.calls("cuMemAllocAsync").unwrap(), THREADS * ROUNDS);
    card.assert_no_violation();
}

#[test]
fn a_thread_s_end_may_still_call_the_driver() {
    struct Last(u64, usize);

    impl Drop for Last {
        fn drop(&mut self) {
            // Runs when the thread's other locals may be gone already.
            let set = call!(cuCtxSetCurrent(std::ptr::with_exposed_provenance_mut(self.1)));
            assert_eq!([set, call!(cuMemFree_v2(self.0))], [0, 0]);
        }
    }

    thread_local! {
        static LAST: std::cell::RefCell<Option<Last>> = const { std::cell::RefCell::new(None) };
    }

    let card = Card::new();
    let (ptr, context) = (card.alloc(4096), card.context.cu_ctx().expose_provenance());
    thread::spawn(move || {
        LAST.set(Some(Last(ptr, context)));
        assert_eq!(call!(cuCtxSetCurrent(std::ptr::with_exposed_provenance_mut(context))), 0);
    })
    .join()
    .unwrap();
    assert_eq!(card.device.number(Number::HeldBytes), 0);
}

/// A device that was being removed once took the context of the next one with its ordinal with it.
#[test]
fn devices_come_and_go_beside_each_other() {
    let come_and_go = || {
        for _ in 0..1000 {
            let card = Card::new();
            let ptr = card.alloc(4096);
            assert_eq!(call!(cuMemFree_v2(ptr)), 0);
        }
    };
    let threads: Vec<_> = (0..THREADS).map(|_| thread::spawn(come_and_go)).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
