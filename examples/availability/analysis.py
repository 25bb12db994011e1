"""Which site was down, and on which days? The availability of each site over the last month that is complete."""

import matplotlib.pyplot as plt

import sr_assets

with sr_assets.connect() as fleet:
    days = fleet.sql("""
        SELECT date, name,
            100 * sum(up_seconds) / sum(up_seconds + timeout_seconds + retired_seconds) AS percent,
            count(*) FILTER (outages > 0) AS silent_nodes
        FROM availability_daily
        WHERE final AND date > (SELECT max(date) FROM availability_daily WHERE final) - 31
        GROUP BY date, name ORDER BY date, name
    """).df()
    worst = fleet.sql("""
        SELECT name, node, sum(outages)::BIGINT AS outages, sum(timeout_seconds + retired_seconds) / 3600 AS hours
        FROM availability_daily
        WHERE final AND date > (SELECT max(date) FROM availability_daily WHERE final) - 31
        GROUP BY name, node ORDER BY hours DESC LIMIT 5
    """).df()

figure, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 5))
for site, rows in days.groupby("name"):
    above.plot(rows["date"], rows["percent"], marker=".", label=site)
    below.plot(rows["date"], rows["silent_nodes"], marker=".", label=site)
above.set_ylabel("availability in %")
below.set_ylabel("nodes with an outage")
above.legend()
figure.autofmt_xdate()
figure.tight_layout()
figure.savefig("availability.svg")
print(worst.to_string(index=False))
