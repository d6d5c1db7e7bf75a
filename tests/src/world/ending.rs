//! How programs end: everything goes back to the device.

use aquifer_allocator::{Allocator, Config};

use super::World;
use crate::model::Handle;
use crate::op::FreeHow;
use crate::setup::Ending;

impl World {
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
            Ending::FreeFirst => self.finish_free_first(),
            Ending::AllocatorFirst => self.finish_allocator_first(),
        }
    }

    fn finish_free_first(mut self) {
        while !self.blocks.0.is_empty() {
            self.free(0, FreeHow::Drop, true);
        }
        self.pools.clear();
        self.assert_usable(&self.allocator);
        self.allocator.empty_cache().unwrap_or_else(|error| panic!("{error}"));
        self.assert_returned(&self.allocator);
    }

    fn finish_allocator_first(mut self) {
        let mut blocks = std::mem::take(&mut self.blocks.0);
        blocks.iter_mut().for_each(|live| self.settle(live));
        let (raw, owned): (Vec<_>, Vec<_>) = blocks.into_iter().partition(|live| matches!(live.handle, Handle::Raw));
        for live in raw {
            self.note_end(&live);
            self.allocator.free_raw(live.ptr).unwrap_or_else(|error| panic!("{error}"));
        }
        self.pools.clear();
        let next = Allocator::new(&self.device, Config::default()).unwrap_or_else(|error| panic!("{error}"));
        self.allocator = next;
        for mut live in owned {
            let reader = self.streams[0].clone();
            if live.bytes > 0 {
                live.order(&reader, true).unwrap_or_else(|error| panic!("{error}"));
                live.verify(&reader).unwrap_or_else(|error| panic!("{error}"));
            }
            self.note_end(&live);
            drop(live);
            self.assert_no_hazard();
        }
        // The device takes the old allocator's memory back when somebody next allocates from it.
        self.assert_usable(&self.allocator);
        self.allocator.empty_cache().unwrap_or_else(|error| panic!("{error}"));
        self.assert_returned(&self.allocator);
    }

    fn assert_usable(&self, allocator: &Allocator) {
        let stream = &self.streams[2];
        for bytes in [512, 1 << 20] {
            let allocation = allocator.alloc_bytes(bytes, stream).unwrap_or_else(|error| panic!("not usable: {error}"));
            let mut found = [0; 16];
            let done = stream.fill(allocation.ptr(), 0x5a, bytes);
            let done = done.and_then(|()| stream.download_blocking(&mut found, allocation.ptr()));
            done.unwrap_or_else(|error| panic!("not usable: {error}"));
            assert_eq!(found, [0x5a; 16]);
        }
    }

    fn assert_returned(&self, allocator: &Allocator) {
        self.assert_no_hazard();
        assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (0, 0), "memory is not given back");
        let (free, total) = (self.driver.free(), self.device.info().total_bytes);
        assert_eq!(free, total, "memory is missing on the device");
        self.driver.assert_no_reservation();
    }
}
