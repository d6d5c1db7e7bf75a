//! How programs end: everything goes back to the device.

use aquifer::Allocator;
use aquifer_allocator::Config;

use super::Interpreter;
use crate::model::Handle;
use crate::op::FreeHow;
use crate::setup::Ending;

impl Interpreter {
    /// Ends the program: takes faults back, frees what is live, and checks that the allocator still
    /// works and that all memory is back on the device.
    pub fn finish(mut self, ending: Ending) {
        self.driver.clear_faults();
        self.driver.set_other_process_bytes(0);
        self.allocator.set_limit(None);
        if self.lost {
            return;
        }
        self.routes.clear();
        self.pins.clear();
        match ending {
            Ending::FreeFirst => {
                while !self.blocks.0.is_empty() {
                    self.free(0, FreeHow::Drop, true);
                }
                self.pools.clear();
            }
            Ending::AllocatorFirst => self.drop_allocator_first(),
        }
        // The device takes the memory of a dropped allocator back at the next allocation.
        self.assert_usable();
        self.allocator.empty_cache().unwrap_or_else(|error| panic!("{error}"));
        self.assert_returned();
    }

    /// Replaces the allocator by a new one, then drops the blocks of the first.
    fn drop_allocator_first(&mut self) {
        let mut blocks = std::mem::take(&mut self.blocks.0);
        blocks.iter_mut().for_each(|live| self.settle(live));
        let (raw, owned): (Vec<_>, Vec<_>) = blocks.into_iter().partition(|live| matches!(live.handle, Handle::Raw));
        for live in raw {
            self.note_end(&live);
            self.allocator.free_raw(live.ptr).unwrap_or_else(|error| panic!("{error}"));
        }
        self.pools.clear();
        self.allocator = Allocator::new(&self.device, Config::default()).unwrap_or_else(|error| panic!("{error}"));
        let reader = self.streams[0].clone();
        for mut live in owned {
            if live.bytes > 0 {
                live.order(&reader, true).unwrap_or_else(|error| panic!("{error}"));
                live.verify(&reader).unwrap_or_else(|error| panic!("{error}"));
            }
            self.note_end(&live);
            drop(live);
            self.assert_no_violation();
        }
    }

    fn assert_usable(&self) {
        let stream = &self.streams[2];
        for bytes in [512, 1 << 20] {
            let allocation =
                self.allocator.alloc_bytes(bytes, stream).unwrap_or_else(|error| panic!("not usable: {error}"));
            let mut found = [0; 16];
            let done = stream.fill(allocation.ptr(), 0x5a, bytes);
            let done = done.and_then(|()| stream.download_blocking(&mut found, allocation.ptr()));
            done.unwrap_or_else(|error| panic!("not usable: {error}"));
            assert_eq!(found, [0x5a; 16]);
        }
    }

    fn assert_returned(&self) {
        self.assert_no_violation();
        let held = (self.allocator.memory_allocated(), self.allocator.memory_reserved());
        assert_eq!(held, (0, 0), "memory is not given back");
        let (free, total) = (self.driver.free(), self.device.info().total_bytes);
        assert_eq!(free, total, "memory is missing on the device");
        self.driver.assert_no_reservation();
    }
}
