//! Many threads on one device.

use std::thread;

use aquifer_standin::Number;

use crate::support::{Card, call};

const THREADS: u64 = 4;

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
fn devices_come_and_go_on_several_threads() {
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
