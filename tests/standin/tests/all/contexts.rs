//! Devices and contexts.

use crate::support::Card;

#[test]
fn a_device_has_a_name_and_memory() {
    let card = Card::new();
    assert!(card.context.name().unwrap().contains("simulated"));
    assert_eq!(card.context.mem_get_info().unwrap(), (1 << 30, 1 << 30));
    let stream = card.context.new_stream().unwrap();
    let data = stream.clone_htod(&[1_u32, 2, 3]).unwrap();
    assert_eq!(stream.clone_dtoh(&data).unwrap(), [1, 2, 3]);
}
