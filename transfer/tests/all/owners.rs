//! Owners that lend another slice at each call.

use aquifer::transfer::Owner;

use super::{content, runtime, small};

/// Lends another slice at each call.
struct Fickle(Vec<u8>, std::sync::atomic::AtomicUsize);

impl AsRef<[u8]> for Fickle {
    fn as_ref(&self) -> &[u8] {
        let asked = self.1.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        &self.0[asked..]
    }
}

/// The slice of the first call is copied.
#[test]
fn the_slice_of_an_owner_is_taken_once() {
    const LEN: usize = 800_000;
    let (_, transfer) = runtime(small());
    let stream = transfer.device().stream().unwrap();
    let fickle = || Fickle(content(LEN, 3), Default::default());
    let mut buffer = transfer.allocator().alloc(LEN, &stream).unwrap();
    buffer.upload(Owner::new(fickle()), &transfer).unwrap().wait().unwrap();
    assert_eq!(buffer.to_vec(&transfer).unwrap(), content(LEN, 3));
    let tensor = aquifer::Tensor::from_owner::<u8, _>(fickle(), &[LEN]).unwrap();
    assert_eq!(tensor.to(&transfer).unwrap().wait().unwrap().to_vec::<u8>().unwrap(), content(LEN, 3));
}
