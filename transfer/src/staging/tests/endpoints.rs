//! Ends that are not what they said.

use super::*;
use crate::Owner;

/// Lends another slice each time that it is asked.
struct Fickle(Vec<u8>, std::sync::atomic::AtomicUsize);

impl AsRef<[u8]> for Fickle {
    fn as_ref(&self) -> &[u8] {
        let asked = self.1.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        &self.0[asked..]
    }
}

/// What an owner lends first is what is copied, and as much of it.
#[test]
fn an_owner_is_asked_once() {
    const LEN: usize = 800_000;
    let (_, transfer) = runtime(SMALL);
    let stream = transfer.device().stream().unwrap();
    let fickle = || Fickle(content(LEN, 3), Default::default());
    let buffer = transfer.to_device(Owner::new(fickle()), &stream).unwrap().wait().unwrap();
    assert_eq!(transfer.to_vec(&buffer).unwrap().wait().unwrap(), content(LEN, 3));
    let tensor = crate::Tensor::from_owner::<u8, _>(fickle(), &[LEN]).unwrap();
    assert_eq!(tensor.to(&transfer).unwrap().wait().unwrap().to_vec_blocking::<u8>().unwrap(), content(LEN, 3));
    let mut pinned = transfer.pinned().alloc::<u8>(LEN).unwrap();
    transfer.copy_on_host(Owner::new(fickle()), &mut pinned).unwrap().wait().unwrap();
    assert_eq!(pinned.read().unwrap(), content(LEN, 3));
}

/// Where the host's end is longer or shorter than the device's, nothing is copied.
#[test]
fn ends_of_different_lengths_are_refused() {
    let world = World::new(sim());
    let stream = world.device.stream().unwrap();
    let buffer = world.buffer(2000, &stream);
    let half = buffer.slice(0..1000);
    for bytes in [999, 1001, 2000] {
        let refused = world.upload(Memory::new(vec![1; bytes]), &half, &stream);
        assert!(matches!(refused, Err(TransferError::LengthMismatch { .. })), "{refused:?}");
        let refused = world.download(&half, Memory::new(vec![1; bytes]), &stream);
        assert!(matches!(refused, Err(TransferError::LengthMismatch { .. })), "{refused:?}");
    }
    world.end();
}
