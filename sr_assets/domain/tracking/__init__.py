"""The rules of sampling and availability, in scalar form and for many senders at once."""
